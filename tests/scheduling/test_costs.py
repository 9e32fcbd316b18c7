"""Costs: interpolation in seconds, repair of noise, three kinds, curves for `plan`."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from dspark_jax.scheduling import costs, planner, probes
from dspark_jax.scheduling.costs import Additive, Costs, Grid, Plane, TokenCurve

CURVE = TokenCurve(
    packed_tokens=(1, 8, 16), step_seconds=(1.0, 1.0, 3.0), max_tokens=64
)
ADDITIVE = Additive(
    bias_seconds=1.0,
    requests=(1, 5),
    alpha_seconds=(0.0, 0.4),
    packed_tokens=(1, 11),
    theta_seconds=(0.1, 1.1),
    context_seconds=0.01,
)
PLANES = (
    Plane(
        requests=1,
        packed_tokens=(1, 8),
        context_tokens=(0, 1000),
        step_seconds=((1.0, 2.0), (1.5, 3.0)),
    ),
    Plane(
        requests=4,
        packed_tokens=(4, 32),
        context_tokens=(0, 4000),
        step_seconds=((1.2, 3.2), (2.6, 4.6)),
    ),
)


def test_a_curve_interpolates_seconds():
    tokens = [0, 1, 5, 8, 10, 16, 20]
    found = CURVE.seconds(3, tokens, 99)
    np.testing.assert_allclose(found, [1, 1, 1, 1, 1.5, 3, 4])
    assert found.dtype == np.float64
    assert CURVE.seconds(1, 12).shape == ()
    flat = TokenCurve(packed_tokens=(4,), step_seconds=(2,), max_tokens=4)
    assert flat.seconds(1, [1, 4, 9]).tolist() == [2, 2, 2]


def test_additive():
    found = ADDITIVE.seconds(3, [1, 6, 21], 100)
    np.testing.assert_allclose(found, 1 + 1 + 0.2 + np.array([0.1, 0.6, 2.1]))
    np.testing.assert_allclose(ADDITIVE.seconds(9, 1), 1 + 0.8 + 0.1)


def test_a_grid_interpolates_along_three_axes():
    grid = Grid(planes=PLANES)
    np.testing.assert_allclose(grid.seconds(1, [1, 8, 15], 0), [1, 1.5, 2])
    np.testing.assert_allclose(grid.seconds(1, [1, 8], 500), [1.5, 2.25])
    np.testing.assert_allclose(grid.seconds(1, 8, 2000), 4.5)  # the last slope
    np.testing.assert_allclose(grid.seconds(4, [1, 4, 18, 32], 0), [1.2, 1.2, 1.9, 2.6])
    np.testing.assert_allclose(grid.seconds(2, 8, 0), 1.5 + (1.4 - 1.5) / 3)
    # Beyond the last plane the slope goes on, but never down.
    np.testing.assert_allclose(grid.seconds(7, 4, 0), grid.planes[1].seconds(4, 0))
    np.testing.assert_allclose(grid.seconds(7, 8, 0), 1.4)
    one = Grid(planes=PLANES[:1])
    np.testing.assert_allclose(one.seconds(64, 8, 0), 1.5)


def test_steps_without_a_draft():
    with_plain = Costs(drafting=Grid(planes=PLANES), plain=ADDITIVE)
    assert with_plain.plain_seconds(5, 10) == pytest.approx(1 + 0.4 + 0.5 + 0.1)
    assert Costs(drafting=CURVE).plain_seconds(12) == pytest.approx(2)


def test_noise_is_made_monotone():
    noisy = TokenCurve(
        packed_tokens=(1, 2, 3, 4), step_seconds=(1.0, 3.0, 2.0, 2.5), max_tokens=4
    )
    assert noisy.step_seconds == (1.0, 2.5, 2.5, 2.5)
    assert noisy.repair == pytest.approx(0.25)
    assert CURVE.repair == 0
    slack = Additive(
        bias_seconds=2.0,
        requests=(1, 2),
        alpha_seconds=(0.5, 0.25),
        packed_tokens=(1, 2),
        theta_seconds=(0.0, 0.5),
    )
    assert slack.alpha_seconds == (0.375, 0.375)
    assert slack.repair == pytest.approx(0.125 / 2)


measured = st.lists(st.floats(0.01, 100), min_size=6, max_size=6)


@hypothesis.given(measured)
def test_isotonic_is_the_nearest_that_does_not_fall(values):
    values = np.array(values)
    found = probes.isotonic(values)
    assert np.all(np.diff(found) >= 0)
    # Its optimality conditions: residuals sum to zero over each level, and within a
    # level no head of it would rather lie higher.
    for level in np.unique(found):
        residual = (values - found)[found == level]
        assert residual.sum() == pytest.approx(0, abs=1e-9 * values.sum())
        assert np.all(np.cumsum(residual) >= -1e-9 * values.sum())


@hypothesis.given(st.lists(measured, min_size=4, max_size=4))
def test_planes_are_monotone_along_both_axes(values):
    plane = Plane(
        requests=1,
        packed_tokens=(1, 2, 3, 9),
        context_tokens=(0, 1, 2, 3, 4, 8),
        step_seconds=tuple(map(tuple, values)),
    )
    found = np.array(plane.step_seconds)
    assert np.all(np.diff(found, axis=0) >= -1e-12)
    assert np.all(np.diff(found, axis=1) >= -1e-12)
    grid = Grid(planes=(plane,))
    assert grid.repair == plane.repair
    around = grid.seconds(2, np.arange(1, 30), 20)
    assert np.all(around > 0)
    assert np.all(np.diff(around) >= -1e-9)


def test_the_curve_of_compiled_programs():
    found = costs.curve(Costs(drafting=CURVE), 2, 3)
    assert found.shape == (9,)
    np.testing.assert_allclose(1 / found[2:], CURVE.seconds(2, np.arange(2, 9)))
    padded = costs.curve(Costs(drafting=CURVE), 4, 3, buckets=[8, 12])
    np.testing.assert_allclose(1 / padded[4:], [1] * 5 + [2] * 4 + [2.25, 2.5, 2.75, 3])
    assert planner.plan(np.ones((4, 3)), padded).verify_length.tolist() == [1] * 4


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: TokenCurve(packed_tokens=(), step_seconds=(), max_tokens=1),
            "`packed_tokens` must have 1 to 4096 probes, got 0",
        ),
        (
            lambda: TokenCurve(
                packed_tokens=tuple(range(1, 4098)),
                step_seconds=(1.0,) * 4097,
                max_tokens=9999,
            ),
            "must have 1 to 4096 probes, got 4097",
        ),
        (
            lambda: TokenCurve(packed_tokens=(2, 2), step_seconds=(1, 1), max_tokens=2),
            r"`packed_tokens` must be strictly increasing, got \(2, 2\)",
        ),
        (
            lambda: TokenCurve(packed_tokens=(0,), step_seconds=(1,), max_tokens=2),
            r"at least 1 and at most 2\*\*40, got \(0,\)",
        ),
        (
            lambda: TokenCurve(packed_tokens=(True,), step_seconds=(1,), max_tokens=2),
            "must hold integers of at least 1",
        ),
        (
            lambda: TokenCurve(packed_tokens=(1, 2), step_seconds=(1,), max_tokens=2),
            r"`step_seconds` must have one value a probe, \(2,\), got \(1,\)",
        ),
        (
            lambda: TokenCurve(packed_tokens=(1,), step_seconds=(0,), max_tokens=2),
            "must hold finite numbers, positive, got 0",
        ),
        (
            lambda: TokenCurve(packed_tokens=(1,), step_seconds=("1",), max_tokens=2),
            "must hold finite numbers, positive, got '1'",
        ),
        (
            lambda: TokenCurve(
                packed_tokens=(1,), step_seconds=(float("nan"),), max_tokens=2
            ),
            "must hold finite numbers, positive, got nan",
        ),
        (
            lambda: TokenCurve(packed_tokens=(4,), step_seconds=(1,), max_tokens=3),
            "`max_tokens` must be at least the last probe, 4, got 3",
        ),
        (
            lambda: additive(bias_seconds=0.0),
            "`bias_seconds` must be positive and finite, got 0.0",
        ),
        (
            lambda: additive(context_seconds=-1.0),
            "`context_seconds` must be finite and at least 0, got -1.0",
        ),
        (
            lambda: additive(alpha_seconds=(-0.5,)),
            "`alpha_seconds` must hold finite numbers, at least 0, got -0.5",
        ),
        (
            lambda: additive(theta_seconds=(0.0, 1.0)),
            r"`theta_seconds` must have one value a probe, \(1,\)",
        ),
        (
            lambda: additive(requests=(2, 1), alpha_seconds=(0, 0)),
            "strictly increasing",
        ),
        (lambda: plane(requests=0), "must be an integer of at least 1, got 0"),
        (lambda: plane(context_tokens=(-1,)), "must hold integers of at least 0"),
        (
            lambda: plane(step_seconds=((1.0, 1.0),)),
            r"`step_seconds` must have one value a probe, \(1, 1\)",
        ),
        (
            lambda: plane(step_seconds=((1.0,), (1.0,))),
            r"`step_seconds` must have one value a probe, \(1, 1\)",
        ),
        (lambda: Grid(planes=()), "`requests` must have 1 to 4096 probes"),
        (
            lambda: Grid(planes=PLANES[::-1]),
            r"`requests` must be strictly increasing, got \(4, 1\)",
        ),
    ],
)
def test_bad_tables(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def additive(**fields):
    given = {
        "bias_seconds": 1.0,
        "requests": (1,),
        "alpha_seconds": (0.0,),
        "packed_tokens": (1,),
        "theta_seconds": (0.0,),
    }
    return Additive(**(given | fields))


def plane(**fields):
    given = {
        "requests": 1,
        "packed_tokens": (1,),
        "context_tokens": (0,),
        "step_seconds": ((1.0,),),
    }
    return Plane(**(given | fields))
