"""Edges of the planner's host part: what is kept, which types, which numbers."""

import numpy as np
import pytest

from dspark_jax.scheduling import budgets
from dspark_jax.scheduling.costs import Additive, Grid, Plane, TokenCurve
from dspark_jax.scheduling.relay import ConfidenceRelay


def plane_of(requests, seconds):
    return Plane(
        requests=requests,
        packed_tokens=(1, 8),
        context_tokens=(0, 10, 40),
        step_seconds=seconds,
    )


GRID = Grid(
    planes=(
        plane_of(1, ((1.0, 2.0, 8.0), (1.5, 3.0, 9.0))),
        plane_of(4, ((1.0, 2.0, 8.0), (2.5, 4.0, 9.0))),
    )
)
CURVE = TokenCurve(packed_tokens=(1, 8), step_seconds=(1.0, 3.0), max_tokens=8)
ADDITIVE = Additive(
    bias_seconds=1.0,
    requests=(1,),
    alpha_seconds=(0.0,),
    packed_tokens=(1,),
    theta_seconds=(0.5,),
)


def past_of(rows, length):
    relay = ConfidenceRelay(rows, length)
    relay.publish(0, range(rows), np.full((rows, length), 0.5))
    return relay.read(2, range(rows))


def test_the_relay_keeps_its_own_slots():
    """A caller that fills one array for all steps must not swap two requests."""
    relay = ConfidenceRelay(2, 1)
    slots = np.array([0, 1])
    relay.publish(0, slots, np.array([[0.1], [0.9]]))
    slots[:] = [1, 0]
    assert relay.read(2, [0, 1]).confidence.tolist() == [[0.1], [0.9]]


def test_the_relay_keeps_its_own_confidences():
    """Those of step 2 in the buffer of step 0 are live when step 2 is planned."""
    relay = ConfidenceRelay(1, 1)
    buffer = np.array([[0.1]])
    relay.publish(0, [0], buffer)
    buffer[:] = 0.7
    assert relay.read(2, [0]).confidence.tolist() == [[0.1]]


@pytest.mark.parametrize("requests", [1, 2, 4])
@pytest.mark.parametrize("surface", [CURVE, ADDITIVE, GRID])
def test_seconds_are_one_type(surface, requests):
    """Arrays, as they are annotated, or numbers; not now these and now those."""
    found = surface.seconds(requests, 5, 3)
    assert isinstance(found, np.ndarray)
    assert (found.dtype, found.shape) == (np.float64, ())


def test_a_context_that_is_no_number_is_not_free():
    found = GRID.seconds(1, [1, 8], float("nan"))
    assert np.isnan(found).all(), found


def test_a_context_of_float32_keeps_seconds_in_float64():
    context = np.float32(7)
    found = GRID.seconds(1, [1, 8], context)
    assert found.tolist() == GRID.seconds(1, [1, 8], 7.0).tolist()


def test_a_size_that_is_no_number_leaves_the_others():
    found = CURVE.seconds(1, [np.nan, 15.0])
    assert np.isnan(found[0])
    assert found[1] == 5.0  # the last slope


@pytest.mark.parametrize(
    ("dtype", "other_tokens"), [(np.int8, 0), (np.uint64, np.int64(2))]
)
def test_buckets_of_any_integers(dtype, other_tokens):
    found = budgets.budget(
        past_of(20, 7),
        step=2,
        buckets=np.array([24, 60, 120], dtype),
        seconds=np.ones(3),
        other_tokens=other_tokens,
    )
    assert found.num_drafts == 100 - other_tokens
