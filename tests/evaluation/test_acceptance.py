"""Acceptance from recorded rounds: where the truth is known, and by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import table_models

from dspark_jax.evaluation import acceptance, rounds
from dspark_jax.evaluation.recording import Recording

pytestmark = pytest.mark.usefixtures("quick_compilation")

V, K = 4, 3


@pytest.fixture(scope="module")
def record():
    """Decodes from tables of log-probabilities: target [V, V, V], drafter by slot."""

    def run(target_logits, draft_logits, *, prompts=64, **settings):
        drafter_params = table_models.DrafterTables(
            logits=jnp.asarray(draft_logits, jnp.float32),
            confidence_logits=jnp.zeros((K, V), jnp.float32),
            look_ahead=jnp.int32(0),
        )
        (recording,) = rounds.record(
            table_models.make_target(V),
            jnp.asarray(target_logits, jnp.float32),
            table_models.make_drafter(V, K),
            [drafter_params],
            [[1, 2]] * prompts,
            jax.random.key(0),
            **({"max_new_tokens": 42, "batch": 64} | settings),
        )
        return recording

    return run


@pytest.mark.parametrize(
    ("rule", "temperature"),
    [("token", 0.0), ("token", 1.0), ("block", 1.0), ("seeded", 1.0)],
)
def test_a_drafter_that_is_the_target_is_always_accepted(record, rule, temperature):
    table = np.random.default_rng(0).normal(size=(V, V, V))
    # 1 token of the prefill, and ten rounds of K + 1.
    recording = record(
        table,
        np.stack([table] * K),
        rule=rule,
        temperature=temperature,
        max_new_tokens=1 + 10 * (K + 1),
        prompts=8,
        batch=8,
    )
    found = acceptance.by_domain(recording, ["a"] * 8)["a"]
    assert found.accepted_length == K + 1
    assert found.interval_95 == (K + 1, K + 1)
    assert found.conditional_acceptance == [1.0] * K
    assert found.num_rounds == 80
    assert found.num_reached == [80] * K
    assert found.accepted_length_by_cap == [2.0, 3.0, 4.0]


P = np.array([0.5, 0.3, 0.15, 0.05])
Q = np.array([[0.4, 0.4, 0.1, 0.1], [0.1, 0.2, 0.3, 0.4], [0.5, 0.3, 0.15, 0.05]])
OVERLAP = np.minimum(P, Q).sum(axis=1)  # 1 - TV: 0.85, 0.5, 1


def within(sigmas, share, truth, count):
    return abs(share - truth) <= sigmas * np.sqrt(truth * (1 - truth) / count) + 1e-9


def test_conditional_acceptance_is_the_overlap_of_the_distributions(record):
    """Not the survival, which at slot 2 is 0.85 * 0.5."""
    target = np.broadcast_to(np.log(P), (V, V, V))
    drafts = np.broadcast_to(np.log(Q)[:, None, None], (K, V, V, V))
    recording = record(target, drafts, prompts=128, max_new_tokens=60)
    # The last rounds are cut by the limit: whole windows only.
    found = acceptance.by_domain(recording, ["a"] * 128)["a"]
    for k in range(K):
        share, count = found.conditional_acceptance[k], found.num_reached[k]
        assert count > 500
        assert within(5, share, OVERLAP[k], count)
    low, high = found.conditional_interval_95[1]
    assert low < 0.5 < high
    assert 0.02 < high - low < 0.08
    whole = recording.verify_length == K
    rounds_ = int(whole.sum())
    survival = np.cumprod(OVERLAP)
    expected = 1 + survival.sum()
    accepted = recording.num_accepted[whole]
    # Lengths 0..3 with known probabilities: mean within five sigmas.
    sigma = np.sqrt(np.var(accepted) / rounds_)
    assert abs(accepted.mean() + 1 - expected) < 5 * sigma
    caps = acceptance.by_cap(recording, whole)
    for k in range(K):
        assert abs(caps[k] - 1 - survival[: k + 1].sum()) < 5 * sigma


def test_a_cap_replayed_is_a_cap_run(record):
    """Draws of a round do not depend on its window: same anchors, same prefix."""
    target = np.broadcast_to(np.log(P), (V, V, V))
    drafts = np.broadcast_to(np.log(Q)[:, None, None], (K, V, V, V))
    whole = record(target, drafts)
    capped = record(target, drafts, max_verify_length=1)
    keys = zip(whole.request, whole.position, strict=True)
    same = {key: row for row, key in enumerate(keys)}
    pairs = [
        (same[key], row)
        for row, key in enumerate(zip(capped.request, capped.position, strict=True))
        if key in same and capped.verify_length[row] == 1
    ]
    ours = np.minimum(whole.num_accepted[[a for a, _ in pairs]], 1)
    np.testing.assert_array_equal(ours, capped.num_accepted[[b for _, b in pairs]])
    assert len(pairs) > 500


def made(num_accepted, verify_length, request, logits=None, ended=None, texts=None):
    size = len(num_accepted)
    prompts = max(request) + 1 if texts is None else len(texts)
    return Recording(
        request=np.array(request, np.int32),
        position=np.arange(size, dtype=np.int32),
        num_drafted=np.full(size, 3, np.int32),
        verify_length=np.array(verify_length, np.int32),
        num_accepted=np.array(num_accepted, np.int32),
        is_ended_by_stop=np.array(ended or [False] * size),
        confidence_logits=None if logits is None else np.array(logits, np.float32),
        new_tokens=tuple(np.arange(4) for _ in range(prompts))
        if texts is None
        else tuple(map(np.asarray, texts)),
        finish=np.full(prompts, 2),
        draft_length=3,
    )


def test_by_hand():
    recording = made(
        [3, 0, 1, 2], [3, 3, 3, 2], [0, 0, 1, 1], ended=[False, False, False, True]
    )
    found = acceptance.by_domain(recording, ["x", "y"])
    assert list(found) == ["x", "y", "all"]
    assert found["x"].accepted_length == (4 + 1) / 2
    assert found["y"].accepted_length == (2 + 2) / 2  # an accepted stop: no bonus
    assert found["all"].accepted_length == (4 + 1 + 2 + 2) / 4
    assert acceptance.mean_over_domains(found) == (2.5 + 2.0) / 2
    assert found["all"].num_reached == [4, 3, 1]
    assert found["all"].conditional_acceptance == [3 / 4, 2 / 3, 1.0]
    # Cut at 1, the last round would not have ended by its stop token.
    assert found["all"].accepted_length_by_cap == [7 / 4, 8 / 4, 9 / 4]
    assert found["all"].num_new_tokens == 8


def test_domains_without_rounds():
    recording = made([1], [3], [0], texts=[[1, 2], [3]])
    found = acceptance.by_domain(recording, ["x", "y"])
    assert found["y"].accepted_length is None
    assert found["y"].interval_95 is None
    assert found["y"].conditional_acceptance == [None] * 3
    assert found["y"].accepted_length_by_cap == [None] * 3
    assert acceptance.mean_over_domains(found) is None
    with pytest.raises(ValueError, match="`domains` must name one of each of 2"):
        acceptance.by_domain(recording, ["x"])


def test_thresholds_by_hand():
    sure, unsure = 4.0, -4.0  # confidences .982 and .018
    recording = made(
        [3, 1, 0],
        [3, 3, 2],
        [0, 0, 1],
        logits=[[sure, sure, unsure], [sure, unsure, sure], [unsure] * 3],
    )
    none, half = acceptance.by_threshold(recording, [0.0, 0.5])
    assert none.accepted_length == (4 + 2 + 1) / 3
    assert none.num_verified_per_round == 8 / 3
    assert none.num_rejected_per_round == 4 / 3
    assert none.acceptance_rate == 7 / (8 + 3)
    assert none.draft_acceptance_rate == 4 / 8
    # Windows 2, 1 and 0: accepted 2, 1 and 0.
    assert half.accepted_length == (3 + 2 + 1) / 3
    assert half.num_verified_per_round == 3 / 3
    assert half.num_rejected_per_round == 0
    assert half.acceptance_rate == 1.0
    (hot,) = acceptance.by_threshold(recording, [0.5], temperatures=[1e6] * 3)
    assert hot.num_verified_per_round in (1.0, 2.0)  # all confidences near a half
    assert acceptance.window(recording, 0.0) == none
    assert acceptance.by_threshold(recording, [1.0])[0].draft_acceptance_rate is None
    with pytest.raises(ValueError, match="`recording` holds no confidences"):
        acceptance.by_threshold(made([0], [3], [0]), [0.5])


def test_repeated_share():
    once = list(range(40))
    assert acceptance.repeated_share([once]) == 0
    twice = list(range(20)) * 2
    assert acceptance.repeated_share([twice]) == 1
    assert acceptance.repeated_share([twice, once]) == 0.5
    assert acceptance.repeated_share([list(range(20)), list(range(20))]) == 0
    assert acceptance.repeated_share([[5] * 10 + once], ngram=5) == 10 / 50
    assert acceptance.repeated_share([]) == 0
