"""The additive model: recovered from its own steps, and the least squares under it."""

import itertools

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from dspark_jax.scheduling import cost_fit
from dspark_jax.scheduling.costs import Additive

TRUE = Additive(
    bias_seconds=0.004,
    requests=(1, 4, 16),
    alpha_seconds=(0.0, 0.0002, 0.0008),
    packed_tokens=(1, 8, 32, 128),
    theta_seconds=(0.0, 0.0001, 0.0015, 0.007),
    context_seconds=2e-8,
)


def steps():
    sizes = itertools.product((1, 4, 16), (1, 8, 32, 128), (0, 1000, 100_000))
    kept = [size for size in sizes if size[0] <= size[1]]
    return [np.array(axis) for axis in zip(*kept, strict=True)]


def test_recovers_an_additive_device():
    requests, tokens, context = steps()
    seconds = [
        float(TRUE.seconds(r, t, c))
        for r, t, c in zip(requests, tokens, context, strict=True)
    ]
    found = cost_fit.fit_additive(requests, tokens, context, np.array(seconds))
    assert found.requests == TRUE.requests
    assert found.packed_tokens == TRUE.packed_tokens
    assert found.context_seconds == pytest.approx(2e-8, rel=1e-6)
    for r, t, c in itertools.product((1, 3, 16, 20), (20, 128, 200), (0, 500, 10**6)):
        np.testing.assert_allclose(
            found.seconds(r, t, c), TRUE.seconds(r, t, c), rtol=1e-6
        )


def test_noise_of_ten_percent_moves_it_little():
    requests, tokens, context = (np.repeat(axis, 20) for axis in steps())
    exact = np.array(
        [
            float(TRUE.seconds(r, t, c))
            for r, t, c in zip(requests, tokens, context, strict=True)
        ]
    )
    noise = np.random.default_rng(0).normal(1, 0.1, len(exact))
    found = cost_fit.fit_additive(requests, tokens, context, exact * noise)
    fitted = [
        float(found.seconds(r, t, c))
        for r, t, c in zip(requests, tokens, context, strict=True)
    ]
    np.testing.assert_allclose(fitted, exact, rtol=0.06)


def test_more_work_never_costs_less():
    # A device that seems faster with more of everything.
    requests, tokens, context = steps()
    found = cost_fit.fit_additive(
        requests, tokens, context, 1.0 / (requests + tokens + context)
    )
    for values in (found.alpha_seconds, found.theta_seconds):
        assert np.all(np.diff(values) >= 0)
    assert found.context_seconds >= 0
    assert found.bias_seconds > 0


def test_one_measured_step():
    found = cost_fit.fit_additive(
        *(np.array([n]) for n in (2, 8, 50)), np.array([0.25])
    )
    assert float(found.seconds(2, 8, 50)) == pytest.approx(0.25)


@hypothesis.given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.integers(0, 8))
def test_non_negative_least_squares_is_optimal(seed, size, more):
    random = np.random.default_rng(seed)
    matrix = random.normal(size=(size + more, size))
    if seed % 3 == 0:
        matrix[:, -1] = matrix[:, 0]  # not of full rank
    values = random.normal(size=size + more)
    found = cost_fit.non_negative_least_squares(matrix, values)
    gradient = matrix.T @ (values - matrix @ found)
    assert np.all(found >= 0)
    assert np.all(gradient <= 1e-8)  # nothing at its bound wants to leave it
    assert np.all(np.abs(gradient[found > 0]) <= 1e-8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seconds": np.ones((2, 1))}, r"`seconds` must have shape \(n,\), n >= 1"),
        ({"seconds": np.array([])}, r"`seconds` must have shape \(n,\), n >= 1"),
        ({"seconds": np.array([1.0, 0.0])}, "`seconds` must be positive and finite"),
        ({"seconds": np.array([1.0, np.nan])}, "`seconds` must be positive and finite"),
        ({"requests": np.array([1])}, r"`requests` must have shape \(n,\) = \(2,\)"),
        ({"requests": np.array([0, 1])}, "`requests` must hold integers of at least 1"),
        (
            {"packed_tokens": np.array([1.0, 2.0])},
            "`packed_tokens` must hold integers of at least 1",
        ),
        (
            {"context_tokens": np.array([-1, 2])},
            "`context_tokens` must hold integers of at least 0",
        ),
    ],
)
def test_bad_arguments(changes, message):
    given = {
        "requests": np.array([1, 2]),
        "packed_tokens": np.array([1, 2]),
        "context_tokens": np.array([0, 0]),
        "seconds": np.array([1.0, 2.0]),
    }
    with pytest.raises(ValueError, match=message):
        cost_fit.fit_additive(**(given | changes))
