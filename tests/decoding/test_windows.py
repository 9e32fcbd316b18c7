"""Verify windows by hand: confidences, thresholds, predicates and caps."""

import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.decoding import windows
from dspark_jax.types import Draft, Row

B, K = 2, 4
NO_STOPS = jnp.full((B, 1), -1, jnp.int32)
ROOM = jnp.full((B,), 99, jnp.int32)


def make_draft(confidence_logits=None, tokens=None, length=None):
    flat = jnp.zeros((B, K), jnp.float32)
    return Draft(
        tokens=jnp.zeros((B, K), jnp.int32) if tokens is None else jnp.asarray(tokens),
        probability=flat,
        logits=flat[..., None],
        ids=None,
        row=Row(top=flat, cut=flat, log_normaliser=flat, point=flat.astype(jnp.int32)),
        confidence_logits=confidence_logits,
        length=length,
    )


def test_confidences():
    logits = jnp.asarray([[0.0, 2.0, -2.0, 40.0], [jnp.nan, jnp.inf, -jnp.inf, 1.0]])
    draft = make_draft(logits)
    got = windows.confidences(draft, None)
    np.testing.assert_allclose(got[0], [0.5, 0.880797, 0.119203, 1.0], rtol=1e-5)
    # What is not finite counts as 0, also +inf.
    np.testing.assert_allclose(got[1], [0, 0, 0, 0.731059], rtol=1e-5)
    temperatures = jnp.asarray([1.0, 2.0, 0.5, 1.0, 7.0])  # of more slots than drafted
    got = windows.confidences(draft, temperatures)
    np.testing.assert_allclose(got[0], [0.5, 0.731059, 0.0179862, 1.0], rtol=1e-5)
    assert windows.confidences(make_draft(), None) is None


@pytest.mark.parametrize(
    ("threshold", "expected"), [(0.0, 4), (0.4, 4), (0.5, 2), (0.75, 1), (0.9, 0)]
)
def test_a_threshold_ends_the_window_at_the_first_slot_below_it(threshold, expected):
    confidence = jnp.asarray([[0.75, 0.5, 0.4, 1.0]] * B)
    got = windows.window_length(
        make_draft(),
        confidence,
        ROOM,
        NO_STOPS,
        threshold=jnp.asarray([threshold, 1.1], jnp.float32),
    )
    np.testing.assert_array_equal(got, [expected, 0])


def test_a_predicate_sees_one_slot_at_a_time_and_its_survival():
    confidence = jnp.asarray([[0.5, 0.5, 0.9, 1.0], [1.0, 0.25, 1.0, 1.0]])
    seen = []

    def keep(k, confidence, survival):
        seen.append((k, np.asarray(confidence), np.asarray(survival)))
        return jnp.asarray([k != 2, k < 3])

    got = windows.window_length(make_draft(), confidence, ROOM, NO_STOPS, keep=keep)
    np.testing.assert_array_equal(got, [2, 3])  # slot 3 of row 0 comes after a False
    assert [k for k, _, _ in seen] == [0, 1, 2, 3]
    np.testing.assert_array_equal(np.stack([c for _, c, _ in seen], 1), confidence)
    survival = np.cumprod(np.asarray(confidence), axis=1)
    np.testing.assert_allclose(np.stack([s for _, _, s in seen], 1), survival)


def test_the_smallest_bound_counts():
    tokens = np.array([[5, 7, 5, 7], [5, 5, 5, 5]], np.int32)
    stops = jnp.asarray([[7, -1], [7, 6]], jnp.int32)

    def length(**bounds):
        arguments = {"remaining": ROOM, "stop_tokens": stops, **bounds}
        draft = make_draft(tokens=tokens, length=arguments.pop("length", None))
        return windows.window_length(draft, None, **arguments).tolist()

    assert length() == [2, 4]  # a drafted stop token is still verified
    assert length(stop_tokens=NO_STOPS) == [4, 4]
    assert length(remaining=jnp.asarray([2, 4], jnp.int32)) == [1, 3]
    assert length(remaining=jnp.asarray([0, 1], jnp.int32)) == [0, 0]
    assert length(max_verify_length=jnp.asarray([9, 1], jnp.int32)) == [2, 1]
    assert length(length=jnp.asarray([1, 0], jnp.int32)) == [1, 0]
