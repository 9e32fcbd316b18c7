"""What no other test pins of the planner's host part (each kills a mutant)."""

import numpy as np
import pytest

from dspark_jax.scheduling import budgets
from dspark_jax.scheduling.costs import Costs, Grid, Plane, TokenCurve
from dspark_jax.scheduling.relay import ConfidenceRelay
from dspark_jax.serving import EngineConfig
from dspark_jax.serving.batching import Bucket, BucketGrid
from dspark_jax.serving.planning import RoundPlanner


def test_slots_of_two_axes_are_refused():
    with pytest.raises(ValueError, match=r"`slots` must lie in 0\.\.2, got \[\[0\]\]"):
        ConfidenceRelay(3, 1).read(0, [[0]])


def test_no_requests_are_read_but_not_planned():
    past = ConfidenceRelay(3, 2).read(0, [])
    assert past.confidence.shape == (0, 2)
    with pytest.raises(ValueError, match="`past` must have at least one request, got"):
        budgets.budget(past, step=0, buckets=[2], seconds=np.ones(1))


def test_unsigned_buckets_are_integers_and_truths_are_not():
    past = ConfidenceRelay(1, 2).read(0, [0])
    found = budgets.budget(
        past, step=0, buckets=np.array([3], np.uint32), seconds=np.ones(1)
    )
    assert found.packed_tokens == 3
    with pytest.raises(ValueError, match="`buckets` must be integers"):
        budgets.budget(past, step=0, buckets=np.array([True]), seconds=np.ones(1))
    with pytest.raises(ValueError, match="strictly increasing"):
        budgets.budget(
            past, step=0, buckets=np.array([4, 3], np.uint32), seconds=np.ones(2)
        )


def test_between_three_contexts():
    plane = Plane(
        requests=1,
        packed_tokens=(1, 8),
        context_tokens=(0, 10, 40),
        step_seconds=((1.0, 2.0, 8.0), (1.5, 3.0, 9.0)),
    )
    np.testing.assert_allclose(plane.seconds([1, 8], 5), [1.5, 2.25])
    np.testing.assert_allclose(plane.seconds([1, 8], 25), [5, 6])


def planner_of(mode, shapes, costs, slots=4):
    config = EngineConfig(mode=mode, num_slots=slots, margin=0.0, plain_margin=0.0)
    return RoundPlanner(config, BucketGrid([Bucket(*s) for s in shapes]), 3, costs)


def curve(tokens, seconds):
    return TokenCurve(packed_tokens=tokens, step_seconds=seconds, max_tokens=tokens[-1])


def plan(planner, rows, *, length=50, limit=500):
    return planner.plan(5, [*range(rows)], np.full(rows, length), np.full(rows, limit))


def test_no_plain_step_where_none_is_declared():
    """A cheap plain step of two requests has no program: it would be compiled."""
    costs = Costs(drafting=curve((2, 16), (9.0, 9.0)), plain=curve((2, 4), (0.1, 0.1)))
    planner = planner_of("compact", [(2, 8), (4, 4), (4, 16)], costs)
    assert plan(planner, 2)[0] == Bucket(2, 8)
    assert plan(planner, 4)[0] == Bucket(4, 4)


def test_cap_accept_may_commit_no_drafts():
    costs = Costs(drafting=curve((4, 16), (9.0, 9.0)), plain=curve((4,), (0.1,)))
    bucket, found = plan(planner_of("cap-accept", [(4, 16)], costs), 4)
    assert (bucket, found.num_drafts) == (Bucket(4, 16), 0)


def test_sizes_are_those_of_so_many_requests():
    costs = Costs(drafting=curve((2, 16), (1.0, 1.1)))
    planner = planner_of("compact", [(2, 8), (4, 16)], costs)
    assert plan(planner, 1)[0] == Bucket(2, 8)
    assert plan(planner, 3)[0] == Bucket(4, 16)


@pytest.mark.parametrize(("left", "tokens"), [(1, 4), (2, 8), (3, 12), (9, 16)])
def test_a_window_that_a_limit_cuts_is_not_paid_for(left, tokens):
    """A round of a request with `left` words to go may draft one fewer."""
    costs = Costs(drafting=curve((4, 16), (1.0, 1.3)))
    shapes = [(4, 5), (4, 8), (4, 12), (4, 16)]
    bucket, _ = plan(
        planner_of("compact", shapes, costs), 4, length=50, limit=50 + left
    )
    assert bucket.tokens == max(tokens, 5)


def test_contexts_are_priced():
    """Long contexts make full windows dear here."""
    plane = Plane(
        requests=4,
        packed_tokens=(4, 8, 16),
        context_tokens=(0, 4000),
        step_seconds=((1.0, 1.0), (1.0, 1.0), (1.0, 9.0)),
    )
    shapes = [(4, 8), (4, 16)]
    planner = planner_of("compact", shapes, Costs(drafting=Grid(planes=(plane,))))
    assert plan(planner, 4, length=1, limit=99)[0] == Bucket(4, 16)
    assert plan(planner, 4, length=1000, limit=1099)[0] == Bucket(4, 8)
