"""The relay: how late, whose, and what of it has arrived."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from dspark_jax.scheduling.relay import ConfidenceRelay


class Arriving:
    """A device array that is computed when it is told to."""

    def __init__(self, values):
        self.values = np.asarray(values, np.float32)
        self.shape = self.values.shape
        self.has_come = False

    def is_ready(self):
        return self.has_come

    def __array__(self, dtype=None, copy=None):
        assert self.has_come, "the relay must not wait"
        return self.values.astype(dtype)


def make_relay(num_slots=3, length=2, **settings):
    relay = ConfidenceRelay(num_slots, length, **settings)
    for slot in range(num_slots):
        relay.assign(slot)
    return relay


def rows(*values):
    return np.array([[value, value] for value in values])


@pytest.mark.parametrize("lag", [1, 2, 3])
def test_a_step_reads_what_the_step_lag_before_it_drafted(lag):
    relay = make_relay(lag=lag)
    for step in range(6):
        past = relay.read(step, [0, 1])
        if step < lag:
            assert not past.is_known.any()
            assert past.confidence.tolist() == rows(1, 1).tolist()
            assert (past.newest_step, past.origin_step.tolist()) == (-1, [-1, -1])
        else:
            assert past.is_known.all()
            assert past.confidence.tolist() == rows(*[(step - lag) / 10] * 2).tolist()
            assert past.newest_step == step - lag
        relay.publish(step, [1, 0], rows(step / 10, step / 10))


def test_rows_come_in_the_order_of_the_slots_asked_for():
    relay = make_relay()
    relay.publish(0, [2, 0], rows(0.2, 0.5, 0.9))  # the third row is padding
    past = relay.read(2, [0, 1, 2])
    average = (0.2 + 0.5) / 2  # of those that are known
    np.testing.assert_allclose(past.confidence, rows(0.5, average, 0.2))
    assert past.is_known.tolist() == [True, False, True]
    assert past.origin_step.tolist() == [0, -1, 0]


def test_a_reused_slot_never_inherits_confidences():
    relay = make_relay()
    relay.publish(0, [0], rows(0.1))
    relay.publish(1, [0], rows(0.2))
    assert relay.assign(0) == 2
    # What the request before drafted arrives later, and is not read.
    for step in (2, 3):
        past = relay.read(step, [0])
        assert past.is_known.tolist() == [False]  # it has the average, then
    relay.publish(2, [0], rows(0.7))
    assert not relay.read(3, [0]).is_known[0]
    assert relay.read(4, [0]).confidence.tolist() == rows(0.7).tolist()


def test_it_never_waits():
    relay = make_relay()
    arrays = [Arriving(rows(step / 4)) for step in range(4)]
    for step, array in enumerate(arrays[:3]):
        relay.publish(step, [0], array)
    assert not relay.read(3, [0]).is_known[0]
    arrays[0].has_come = True
    assert relay.read(3, [0]).origin_step.tolist() == [0]
    arrays[1].has_come = True
    assert relay.read(3, [0]).origin_step.tolist() == [1]
    assert relay.read(9, [0]).origin_step.tolist() == [1]
    # Out of order: the older one, late, does not replace the newer.
    relay.publish(3, [0], arrays[3])
    arrays[3].has_come = True
    assert relay.read(9, [0]).origin_step.tolist() == [3]
    arrays[2].has_come = True
    assert relay.read(9, [0]).origin_step.tolist() == [3]


def test_the_ring_holds_a_few_steps():
    relay = make_relay()
    arrays = [Arriving(rows(0.5)) for _ in range(9)]
    for step, array in enumerate(arrays):
        relay.publish(step, [0], array)
    for array in arrays[:6]:
        array.has_come = True  # too late: their places were needed
    assert not relay.read(20, [0]).is_known[0]
    arrays[6].has_come = True
    assert relay.read(20, [0]).origin_step.tolist() == [6]


def test_steps_without_a_draft_leave_the_last_confidences():
    relay = make_relay()
    relay.publish(0, [0], rows(0.25))
    for step in range(2, 50):
        assert relay.read(step, [0]).confidence.tolist() == rows(0.25).tolist()


def test_a_smaller_step_than_before_sees_nothing_newer():
    relay = make_relay()
    relay.publish(5, [0], rows(0.25))
    assert relay.read(7, [0]).is_known[0]
    assert not relay.read(6, [0]).is_known[0]


def test_values_that_are_no_probabilities():
    relay = make_relay(1, 4)
    relay.publish(0, [0], np.array([[np.nan, np.inf, -0.1, 1.0000001]]))
    assert relay.read(2, [0]).confidence.tolist() == [[0, 0, 0, 1]]


@hypothesis.given(st.data())
def test_what_is_read_is_old_enough_and_the_request_s_own(data):
    """Random requests in random slots: every value names who drafted it, and when."""
    lag = data.draw(st.integers(1, 3))
    relay = ConfidenceRelay(3, 1, lag=lag)
    owner = [None, None, None]
    pending, published = [], {}
    for step in range(12):
        for slot in range(3):
            if owner[slot] is None or data.draw(st.booleans()):
                owner[slot] = (step, slot)  # a request is who came when
                relay.assign(slot)
        for array in pending:
            array.has_come = array.has_come or data.draw(st.booleans())
        past = relay.read(step, range(3))
        for slot in range(3):
            if past.is_known[slot]:
                who, when = published[float(past.confidence[slot, 0])]
                assert who == owner[slot]
                assert past.origin_step[slot] == when <= step - lag
            else:
                assert past.origin_step[slot] == -1
        slots = data.draw(st.lists(st.integers(0, 2), unique=True))
        if slots:
            values = [(step * 3 + slot + 1) / 64 for slot in slots]
            for slot, name in zip(slots, values, strict=True):
                published[name] = (owner[slot], step)
            pending.append(Arriving(np.array(values)[:, None]))
            relay.publish(step, slots, pending[-1])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda r: ConfidenceRelay(0, 2), "`num_slots` must be at least 1, got 0"),
        (lambda r: ConfidenceRelay(2, 0), "`draft_length` must be at least 1, got 0"),
        (lambda r: ConfidenceRelay(2, 2, lag=0), "`lag` must be at least 1, got 0"),
        (lambda r: r.assign(3), r"`slots` must lie in 0..2, got \[3\]"),
        (lambda r: r.read(0, [-1]), r"`slots` must lie in 0..2, got \[-1\]"),
        (lambda r: r.publish(0, [0], rows(1, 1)), "must be above the last .* 0, got 0"),
        (lambda r: r.publish(1, [0, 0], rows(1, 1)), "must name no slot twice, got"),
        (
            lambda r: r.publish(1, [0, 1], rows(1)),
            r"`confidence` must have shape \(n, K\) = \(2, 2\), or more rows, got \(1",
        ),
        (
            lambda r: r.publish(1, [0], np.ones((1, 3))),
            r"= \(1, 2\), or more rows, got",
        ),
        (lambda r: r.publish(1, [0], np.ones(2)), r"= \(1, 2\), or more rows, got"),
    ],
)
def test_bad_arguments(call, message):
    relay = make_relay()
    relay.publish(0, [0], rows(1))
    with pytest.raises(ValueError, match=message):
        call(relay)


def test_new_requests_are_promised_the_average():
    relay = make_relay()
    assert relay.read(0, [0]).confidence.tolist() == [[1, 1]]  # nothing is known
    relay.publish(0, [0, 1], np.array([[0.9, 0.5], [0.7, np.nan]]))
    assert relay.read(1, [2]).newest_step == -1  # not old enough
    relay.assign(0)
    past = relay.read(2, [0, 1])
    assert past.is_known.tolist() == [False, True]
    np.testing.assert_allclose(past.confidence, [[0.8, 0.25], [0.7, 0]])
    # It is as old as the newest of its rows, and says so.
    assert past.newest_step == relay.read(2, [2]).newest_step == 0
    relay.publish(3, [1], np.array([[0.2, 1]]))
    past = relay.read(5, [0])
    np.testing.assert_allclose(past.confidence, [[0.6, 0.5]])
    assert (past.newest_step, past.origin_step.tolist()) == (3, [-1])


def test_the_average_forgets():
    relay = make_relay()
    for step in range(4000):
        relay.publish(step, [0, 1, 2], np.full((3, 2), 0.9 if step < 2000 else 0.1))
        relay.read(step, [0])
    relay.assign(0)
    np.testing.assert_allclose(relay.read(4000, [0]).confidence, 0.1, atol=0.06)
