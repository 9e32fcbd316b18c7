"""Catching up enters the choice between drafting and not, and keeps drafting out never.

The loop of an engine without its device: what waits to be caught up, and what the
planner then chooses.
"""

import numpy as np
import pytest

from dspark_jax.scheduling.costs import Costs, TokenCurve
from dspark_jax.serving import EngineConfig
from dspark_jax.serving.batching import BucketGrid, buckets_of
from dspark_jax.serving.planning import RoundPlanner

SLOTS, LENGTH, EVERY = 4, 3, 5
MARGIN = 0.08
SIZES = (4, 8, 16)
PLAIN = 1.0  # seconds; four tokens


def make_planner(mode="compact", drafting=(1.6, 1.6, 1.6)):
    costs = Costs(
        drafting=TokenCurve(packed_tokens=SIZES, step_seconds=drafting, max_tokens=16),
        plain=TokenCurve(packed_tokens=(4,), step_seconds=(PLAIN,), max_tokens=4),
    )
    config = EngineConfig(
        mode=mode, num_slots=SLOTS, probe_every=EVERY, plain_margin=MARGIN
    )
    grid = BucketGrid(buckets_of(mode, [SLOTS], LENGTH))
    return RoundPlanner(config, grid, LENGTH, costs)


def choices(planner, gain, price, *, first=0, num_steps=40, noise=0.0):
    """Whether each step drafts, when full windows make `gain` as many words a second.

    `price` is that of catching up, which a step that drafts after a plain one pays.
    """
    rng = np.random.default_rng(0)
    slots, lengths, limits = [*range(SLOTS)], np.full(SLOTS, 50), np.full(SLOTS, 500)
    tau = gain * float(planner._costs.seconds(SLOTS, 16)) / PLAIN  # of a request
    roots = np.roots([1, 1, 1, 1 - tau])  # c + c² + c³ = tau - 1
    confidence = float(roots[np.isreal(roots)].real[0])
    drafts, waits = [], first > 0
    for step in range(first, first + num_steps):
        bucket, plan = planner.plan(step, slots, lengths, limits, waits * price)
        drafts.append(not bucket.is_plain)
        waits = bucket.is_plain
        # Predicted is the round alone: that is what its time is compared with.
        seconds = PLAIN
        if not bucket.is_plain:
            seconds = float(planner._costs.seconds(SLOTS, bucket.tokens))
            values = np.full((SLOTS, LENGTH), confidence)
            values += noise * rng.normal(size=values.shape)
            planner.publish(step, slots, np.clip(values, 0, 1))
        assert plan.seconds == pytest.approx(seconds)
    return drafts


def test_drafting_that_pays_for_catching_up_at_once_begins_at_once():
    planner = make_planner()
    choices(planner, gain=1.3, price=0.0, num_steps=3)  # confidences are known
    assert all(choices(planner, gain=1.3, price=0.3, first=3))


def test_drafting_that_pays_later_begins_with_the_next_probe_and_stays():
    """13 % a round against a third of one: never in one step, but soon in many."""
    planner = make_planner()
    choices(planner, gain=1.13, price=0.0, num_steps=3)
    drafts = choices(planner, gain=1.13, price=0.5, first=3)
    assert drafts == [False] * EVERY + [True] * (len(drafts) - EVERY)


def test_drafting_that_does_not_pay_is_a_probe_in_so_many_steps():
    planner = make_planner()
    choices(planner, gain=0.9, price=0.0, num_steps=3)
    drafts = choices(planner, gain=0.9, price=0.5, first=3)
    steps = np.flatnonzero(drafts)
    assert steps[0] <= EVERY
    assert set(np.diff(steps)) == {EVERY + 1}


@pytest.mark.parametrize("gain", [0.99, 1.0, 1.01])
def test_what_is_about_equal_does_not_alternate(gain):
    """Drafting begins anew with probes only: so seldom is catching up paid for."""
    planner = make_planner()
    drafts = choices(planner, gain * (1 + MARGIN), 0.5, num_steps=600, noise=0.1)
    begins = np.flatnonzero(np.diff(np.array(drafts, np.int8)) == 1)
    assert len(begins) > 1
    assert np.diff(begins).min() > EVERY


@pytest.mark.parametrize(("mode", "seconds"), [("compact", 1.1), ("cap-accept", 3.0)])
def test_the_time_predicted_is_that_of_the_shape_that_runs(mode, seconds):
    """ "cap-accept" commits what the shape of 8 would, and runs that of 16."""
    planner = make_planner(mode, drafting=(1.0, 1.1, 3.0))
    slots = [*range(SLOTS)]
    planner.publish(0, slots, np.tile([0.9, 0.01, 0.01], (SLOTS, 1)))
    bucket, plan = planner.plan(5, slots, np.full(SLOTS, 9), np.full(SLOTS, 99), 0.5)
    assert plan.num_drafts == 4
    assert bucket.tokens == {"compact": 8, "cap-accept": 16}[mode]
    assert plan.seconds == pytest.approx(seconds)


def test_only_metered_rounds_are_priced():
    bucket, plan = make_planner("static").plan(
        0, [0, 1], np.full(2, 9), np.full(2, 30), 9.0
    )
    assert bucket.tokens == 16
    assert plan.seconds == pytest.approx(1.6)
