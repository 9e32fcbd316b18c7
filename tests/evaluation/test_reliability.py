"""Reliability of confidences and calibration from recordings of synthetic rounds."""

import jax
import numpy as np
import pytest

from dspark_jax.evaluation import calibrate, recording, reliability
from dspark_jax.evaluation.recording import Recording
from dspark_jax.scheduling import calibration


def synthetic(n, *, sharpness=2.0, seed=0, length=4, prompts=1):
    """Slots survive with sigmoid(z); the head says sigmoid(sharpness * z)."""
    random = np.random.default_rng(seed)
    z = random.normal(0.8, 1.0, (n, length))
    passes = random.random((n, length)) < calibration.confidence(z)
    accepted = np.cumprod(passes, axis=1).sum(axis=1).astype(np.int32)
    verified = np.where(random.random(n) < 0.1, 2, length).astype(np.int32)
    return Recording(
        request=np.sort(random.integers(0, prompts, n)).astype(np.int32),
        position=np.arange(n, dtype=np.int32),
        num_drafted=np.full(n, length, np.int32),
        verify_length=verified,
        num_accepted=np.minimum(accepted, verified),
        is_ended_by_stop=np.zeros(n, bool),
        confidence_logits=(sharpness * z).astype(np.float32),
        new_tokens=tuple(np.arange(3) for _ in range(prompts)),
        finish=np.full(prompts, 2),
        draft_length=length,
    )


def test_an_honest_head_shows_the_ideal_error():
    slots = reliability.by_slot(synthetic(20_000, sharpness=1.0))
    for slot in slots:
        assert slot.ece < 1.6 * slot.ideal_ece
        assert abs(slot.accepted_share - slot.predicted_mean) < 0.01
        assert slot.auroc > 0.65
    assert [slot.num_rounds for slot in slots[:2]] == [20_000] * 2
    assert slots[2].num_rounds == slots[3].num_rounds == pytest.approx(18_000, rel=0.02)
    assert slots[0].bins.num_rows.sum() == 20_000


def test_calibration_brings_an_overconfident_head_near_the_ideal():
    judged = calibrate.judge(
        synthetic(20_000),
        synthetic(20_000, seed=1),
        rule="token",
        temperature=1.0,
        dataset="synthetic",
    )
    before, after = (reliability.summarise(s) for s in (judged.before, judged.after))
    assert before.ece_mean > 0.05
    assert after.ece_worst < 0.015
    assert after.ece_mean < 1.6 * after.ideal_ece_mean
    assert after.brier_mean < before.brier_mean
    found = judged.calibration
    assert found.num_samples == judged.num_fitted == judged.num_judged == 20_000
    assert found.ece_after == tuple(slot.ece for slot in judged.after)
    assert judged.num_judged_at == [slot.num_rounds for slot in judged.after]
    assert judged.num_reached_at[0] == 20_000
    assert all(np.diff(judged.num_reached_at) < 0)


def test_slots_without_rounds_say_nothing():
    rounds = synthetic(50)
    rounds = rounds._replace(
        verify_length=np.ones(50, np.int32),
        num_accepted=np.minimum(rounds.num_accepted, 1),
    )
    slots = reliability.by_slot(rounds)
    assert slots[1].ece is None
    assert slots[1].num_rounds == 0
    written = reliability.to_json(slots)
    assert written["slots"][1]["bins"]["predicted"] == [None] * 20
    assert written["ece_worst"] == slots[0].ece
    judged = calibrate.judge(
        rounds, rounds, rule="token", temperature=1.0, dataset="synthetic"
    )
    assert judged.calibration.ece_after == ()
    assert judged.calibration.temperatures[1:] == (1.0, 1.0, 1.0)


def test_no_confidences():
    rounds = synthetic(5)._replace(confidence_logits=None)
    with pytest.raises(ValueError, match="`recording` holds no confidences"):
        reliability.by_slot(rounds)
    with pytest.raises(ValueError, match="`fitted_on` holds no confidences"):
        calibrate.judge(rounds, rounds, rule="token", temperature=1.0, dataset="")


def test_halves_share_no_prompt_and_split_every_domain():
    assert calibrate.halves(["x", "y", "x", "y", "x"]) == ([0, 1, 4], [2, 3])
    with pytest.raises(ValueError, match="at least 2 of one domain, got 2 in 2"):
        calibrate.halves(["x", "y"])


class Recorder:
    """Stands in for the decoding loop: 3 rounds a prompt."""

    def __init__(self, rounds_each=3):
        self.calls, self.rounds_each = [], rounds_each

    def __call__(self, chosen, keys):
        self.calls.append((list(chosen), jax.random.key_data(keys).tolist()))
        n = self.rounds_each * len(chosen)
        return synthetic(n, prompts=len(chosen))


def test_collect_goes_on_with_new_seeds():
    record, seen = Recorder(), []
    found = calibrate.collect(
        record,
        [4, 7, 9],
        20,
        key=jax.random.key(0),
        batch=2,
        is_random=True,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert found.num_rounds == 24
    assert [chosen for chosen, _ in record.calls] == [[4, 7], [9, 4], [7, 9], [4, 7]]
    keys = [tuple(key) for _, keys in record.calls for key in keys]
    assert len(set(keys)) == 8  # no prompt draws twice with one key
    assert seen == [(6, 20), (12, 20), (18, 20), (20, 20)]
    again = Recorder()
    calibrate.collect(
        again, [4, 7, 9], 20, key=jax.random.key(0), batch=2, is_random=True
    )
    assert again.calls == record.calls


def test_collect_without_randomness_is_one_pass():
    record = Recorder()
    found = calibrate.collect(
        record, [4, 7, 9], 1000, key=jax.random.key(0), batch=2, is_random=False
    )
    assert found.num_rounds == 9
    assert [chosen for chosen, _ in record.calls] == [[4, 7], [9]]


def test_collect_ends_where_nothing_comes():
    with pytest.raises(ValueError, match="every answer ends at once"):
        calibrate.collect(
            Recorder(0), [4, 7], 10, key=jax.random.key(0), batch=2, is_random=True
        )


def test_concatenate():
    one, two = synthetic(6, prompts=2), synthetic(4, seed=1, prompts=3)
    both = recording.concatenate([one, two])
    assert both.num_rounds == 10
    assert len(both.new_tokens) == 5
    assert both.request.tolist() == [*one.request, *(two.request + 2)]
    assert both.select([2, 3, 4]).num_accepted.tolist() == two.num_accepted.tolist()
    with pytest.raises(ValueError, match="must have one draft length, got \\[3, 4\\]"):
        recording.concatenate([one, synthetic(3, length=3)])
    with pytest.raises(ValueError, match="must all hold confidences, or none"):
        recording.concatenate([one, two._replace(confidence_logits=None)])
    with pytest.raises(ValueError, match="at least one recording, got 0"):
        recording.concatenate([])
