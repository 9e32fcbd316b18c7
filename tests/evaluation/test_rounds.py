"""Recorded rounds are those of `speculative_generate`, and cost one compilation."""

import functools
import re

import jax
import numpy as np
import pytest

import dspark_jax
from dspark_jax.evaluation import rounds
from dspark_jax.types import FINISH_STOP

pytestmark = pytest.mark.usefixtures("quick_compilation")

STOP = (3, 11)


def record(models, prompts, keys, params=None, **settings):
    settings = {"max_new_tokens": 20, "batch": 3, "stop_tokens": STOP} | settings
    return rounds.record(
        models.target,
        models.target_params,
        models.drafter,
        [models.drafter_params] if params is None else params,
        prompts,
        keys,
        **settings,
    )


def generate(models, prompts, keys, temperature=1.0, threshold=None, **options):
    width = max(map(len, prompts))
    tokens = np.array([p + [0] * (width - len(p)) for p in prompts], np.int32)
    lengths = np.array([len(p) for p in prompts], np.int32)
    function = functools.partial(
        dspark_jax.speculative_generate,
        target=models.target,
        drafter=models.drafter,
        max_new_tokens=20,
        options=dspark_jax.Speculation(**options),
        stop_tokens=STOP,
    )
    return jax.jit(function)(
        keys,
        tokens,
        lengths,
        target_params=models.target_params,
        drafter_params=models.drafter_params,
        sampling=dspark_jax.Sampling(temperature=temperature or None),
        confidence_threshold=threshold,
    )


@pytest.mark.parametrize(
    ("rule", "temperature", "draft_length", "threshold"),
    [
        ("token", 1.0, None, None),
        ("block", 0.7, 3, None),
        ("seeded", 1.0, None, 0.45),
        ("token", 0.0, None, None),
    ],
)
def test_rounds_agree_with_the_generation_s_statistics(
    models, prompts, keys, rule, temperature, draft_length, threshold
):
    (recording,) = record(
        models,
        prompts,
        keys,
        temperature=temperature,
        rule=rule,
        draft_length=draft_length,
        confidence_threshold=threshold,
    )
    wanted = generate(
        models, prompts, keys, temperature, threshold,
        rule=rule, draft_length=draft_length,
    )  # fmt: skip
    stats, length = wanted.stats, draft_length or 4
    assert recording.draft_length == length
    for index, prompt in enumerate(prompts):
        new = wanted.tokens[index, len(prompt) : wanted.lengths[index]]
        np.testing.assert_array_equal(recording.new_tokens[index], new)
        mine = recording.select([index])
        assert mine.num_rounds == int(stats.num_rounds[index])
        assert mine.accepted_sum.sum() == int(stats.accepted_sum[index])
        assert mine.num_accepted.sum() == int(stats.num_accepted[index])
        assert mine.verify_length.sum() == int(stats.num_verified[index])
        slots = np.arange(length)[None]
        for name, counted in (
            ("verified_at", mine.verify_length),
            ("accepted_at", mine.num_accepted),
            ("reached_at", np.minimum(mine.verify_length, mine.num_accepted + 1)),
        ):
            per_slot = (slots < counted[:, None]).sum(0)
            np.testing.assert_array_equal(per_slot, getattr(stats, name)[index])
        if not mine.num_rounds:
            continue  # the prefill drew a stop token
        # Anchors: the first is the prefill's token, the next follow what was committed.
        steps = mine.num_accepted + 1
        assert mine.position[0] == len(prompt)
        np.testing.assert_array_equal(np.diff(mine.position), steps[:-1])
    np.testing.assert_array_equal(recording.finish, wanted.finish)
    assert recording.accepted_length == pytest.approx(
        float(stats.accepted_length), rel=1e-6
    )
    assert np.all(recording.num_drafted == length)
    assert recording.confidence_logits.shape == (recording.num_rounds, length)
    assert np.all(np.isfinite(recording.confidence_logits))


def test_some_rounds_end_by_an_accepted_stop_token(models, prompts):
    many = prompts * 8
    (recording,) = record(models, many, jax.random.key(0), batch=28)
    ended = np.flatnonzero(recording.is_ended_by_stop)
    assert len(ended) > 3
    for row in ended:
        request = recording.request[row]
        assert recording.finish[request] == FINISH_STOP
        assert recording.new_tokens[request][-1] in STOP
        last = recording.position[row] + recording.num_accepted[row]
        assert last == len(many[request]) + len(recording.new_tokens[request]) - 1
    assert np.all(recording.accepted_sum[ended] == recording.num_accepted[ended])


def test_batch_and_order_change_no_round(models, prompts, keys):
    (one,) = record(models, prompts, keys, batch=7)
    (other,) = record(models, prompts, keys, batch=2)
    (turned,) = record(models, prompts[::-1], keys[::-1], batch=3)
    turned = turned.select(range(len(prompts))[::-1])
    for found in (other, turned):
        for name, wanted in one._asdict().items():
            value = getattr(found, name)
            if name == "confidence_logits":
                np.testing.assert_allclose(value, wanted, atol=1e-5)
            elif name == "new_tokens":
                assert [v.tolist() for v in value] == [w.tolist() for w in wanted]
            else:
                np.testing.assert_array_equal(value, wanted, err_msg=name)


def test_drafters_of_one_structure_share_a_compilation(models, prompts, keys):
    others = [
        jax.tree.map(lambda x, s=scale: x * s, models.drafter_params)
        for scale in (1.0, 1.1, 0.5)
    ]
    rounds._run.clear_cache()
    found = record(models, prompts, keys, others, rule="block")
    again = record(models, prompts, keys, [others[2]], rule="block", temperature=0.4)
    assert rounds._run._cache_size() == 1
    assert len(found) == 3
    assert len(again) == 1
    (alone,) = record(models, prompts, keys, [others[1]], rule="block")
    np.testing.assert_array_equal(found[1].num_accepted, alone.num_accepted)
    assert not np.array_equal(found[0].position, found[2].position)


def test_a_cap_bounds_every_window(models, prompts, keys):
    (recording,) = record(models, prompts, keys, max_verify_length=2)
    assert recording.verify_length.max() == 2
    assert recording.confidence_logits.shape[1] == 4


def test_prompt_lookup_offers_fewer_slots_and_has_no_confidence(models):
    drafter, params = dspark_jax.make_prompt_lookup(4)
    models = models._replace(drafter=drafter, drafter_params=params)
    (recording,) = record(models, [[1, 2, 3, 1, 2, 3, 1], [5]], jax.random.key(0))
    assert recording.confidence_logits is None
    assert len(set(recording.num_drafted.tolist())) > 1
    assert np.all(recording.verify_length <= recording.num_drafted)


def test_progress_counts_prompts_of_all_drafters(models, prompts, keys):
    seen = []
    record(
        models,
        prompts,
        keys,
        [models.drafter_params] * 2,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen == [(3, 14), (6, 14), (9, 14), (12, 14), (13, 14), (14, 14)]


def test_select_numbers_prompts_anew(models, prompts, keys):
    (recording,) = record(models, prompts, keys, stop_tokens=())
    part = recording.select([4, 1])
    assert sorted(set(part.request.tolist())) == [0, 1]
    assert [t.tolist() for t in part.new_tokens] == [
        recording.new_tokens[4].tolist(),
        recording.new_tokens[1].tolist(),
    ]
    mine = recording.request == 4
    np.testing.assert_array_equal(
        part.num_accepted[part.request == 0], recording.num_accepted[mine]
    )


GOOD = {"prompts": [[1, 2], [3]], "keys": jax.random.key(0)}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"prompts": []}, ValueError, "`prompts` must hold at least one prompt"),
        (
            {"prompts": [[1], []]},
            ValueError,
            "`prompts[1]` must hold at least one token, got 0",
        ),
        (
            {"prompts": [[1] * 65]},
            ValueError,
            "`prompts` must have at most 64 tokens, got 65",
        ),
        ({"width": 1}, ValueError, "`prompts` must have at most 1 tokens, got 2"),
        ({"max_new_tokens": 1}, ValueError, "`max_new_tokens` must be at least 2"),
        ({"batch": 0}, ValueError, "`batch` must be at least 1, got 0"),
        ({"temperature": -1.0}, ValueError, "`temperature` must be a number >= 0"),
        ({"temperature": None}, ValueError, "`temperature` must be a number >= 0"),
        ({"rule": "fast"}, ValueError, "rule must be one of"),
        ({"draft_length": 5}, ValueError, "at most the drafter's block size 4"),
        (
            {"keys": jax.random.split(jax.random.key(0), 3)},
            ValueError,
            "`key` must have shape (B) = (2,), got (3,)",
        ),
        (
            {"confidence_threshold": 2.0},
            ValueError,
            "`confidence_threshold` must lie in [0, 1], got 2.0",
        ),
        (
            {"confidence_temperatures": [0.0] * 4},
            ValueError,
            "`confidence_temperatures` must be positive and finite",
        ),
    ],
)
def test_bad_arguments(models, change, error, message):
    arguments = GOOD | change
    with pytest.raises(error, match=re.escape(message)):
        record(models, arguments.pop("prompts"), arguments.pop("keys"), **arguments)
