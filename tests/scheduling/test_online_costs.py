"""Costs that follow real steps: what they learn, what they forget, what they resist."""

import numpy as np
import pytest

from dspark_jax.scheduling import online_costs
from dspark_jax.scheduling.costs import Costs, TokenCurve
from dspark_jax.scheduling.online_costs import OnlineCosts

CURVE = TokenCurve(packed_tokens=(1, 101), step_seconds=(1.0, 2.0), max_tokens=128)
TABLE = Costs(drafting=CURVE)


def test_it_begins_as_the_table():
    costs = OnlineCosts(TABLE)
    assert costs.seconds(4, [4, 51]).tolist() == CURVE.seconds(4, [4, 51]).tolist()
    assert costs.seconds(4, 51).shape == ()
    assert costs.plain_seconds(51) == TABLE.plain_seconds(51) == 1.5
    assert costs.drift() == 0


def test_it_follows_what_a_size_costs():
    costs = OnlineCosts(TABLE)
    random = np.random.default_rng(0)
    for _ in range(400):
        costs.update(8, 51, 500, 3.0 * random.normal(1, 0.05))
        costs.update(8, 101, 500, 2.0 * random.normal(1, 0.05))
    np.testing.assert_allclose(costs.seconds(8, [51, 101], 500), [3.0, 2.0], rtol=0.03)
    # Contexts near it, too; each has its own average where it ran.
    assert float(costs.seconds(8, 51, 300)) == pytest.approx(3.0, rel=0.03)
    for _ in range(100):
        costs.update(8, 51, 100_000, 6.0)
        costs.update(8, 51, 500, 3.0)
        costs.update(8, 101, 500, 2.0)
    assert float(costs.seconds(8, 51, 90_000)) == pytest.approx(6.0, rel=0.03)
    np.testing.assert_allclose(costs.seconds(8, [51, 101], 500), [3.0, 2.0], rtol=0.03)
    assert costs.drift() == pytest.approx((np.log(2) + 0 + np.log(4)) / 3, abs=0.05)


def test_a_slower_device_is_slower_at_sizes_that_have_not_run():
    costs = OnlineCosts(TABLE)
    for _ in range(200):
        costs.update(8, 51, 0, 3.0)
    assert float(costs.seconds(8, 101)) == pytest.approx(4.0, rel=1e-3)
    assert float(costs.seconds(1, 1)) == pytest.approx(2.0, rel=1e-3)
    assert costs.plain_seconds(1) == pytest.approx(2.0, rel=1e-3)


@pytest.mark.parametrize("seconds", [15.0, 1500.0])
def test_a_slow_first_step_rules_nothing_out(seconds):
    costs = OnlineCosts(TABLE)
    for _ in range(10):
        costs.update(8, 51, 0, 1.5)
    costs.update(8, 101, 0, seconds)
    usual, slow = costs.seconds(8, [51, 101])
    assert slow / usual == pytest.approx(2.0 / 1.5, rel=0.05)
    for _ in range(100):  # unless it was no accident
        costs.update(8, 101, 0, 3.0)
    assert float(costs.seconds(8, 101)) == pytest.approx(3.0, rel=0.02)


def test_plain_steps_are_another_kind():
    costs = OnlineCosts(TABLE)
    for _ in range(300):
        costs.update(51, 51, 0, 3.0)
        costs.update(51, 51, 0, 1.5, is_drafting=False)
    assert float(costs.seconds(51, 51)) == pytest.approx(3.0, rel=0.01)
    assert costs.plain_seconds(51) == pytest.approx(1.5, rel=0.01)


def test_one_hiccup_moves_little_and_a_change_moves_all():
    costs = OnlineCosts(TABLE, weight=0.1)
    for _ in range(100):
        costs.update(8, 51, 0, 1.5)
    costs.update(8, 51, 0, 150.0)
    assert float(costs.seconds(8, 51)) < 1.5 * 1.2
    for _ in range(200):
        costs.update(8, 51, 0, 150.0)
    assert float(costs.seconds(8, 51)) == pytest.approx(150, rel=0.02)


def test_a_bad_spell_is_forgotten():
    costs = OnlineCosts(TABLE)
    for _ in range(50):
        costs.update(8, 101, 0, 4.0)
    assert float(costs.seconds(8, 101)) == pytest.approx(4.0, rel=0.01)
    for _ in range(5 * online_costs.MEMORY):
        costs.update(8, 51, 0, 1.5)
    assert float(costs.seconds(8, 101)) == pytest.approx(2.0, rel=0.01)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: OnlineCosts(TABLE, weight=0), r"`weight` must lie in \(0, 1\], got 0"),
        (lambda: OnlineCosts(TABLE, weight=2), r"`weight` must lie in \(0, 1\], got 2"),
        (
            lambda: OnlineCosts(TABLE).update(1, 1, 0, 0.0),
            "`seconds` must be positive and finite, got 0.0",
        ),
        (
            lambda: OnlineCosts(TABLE).update(1, 1, 0, float("nan")),
            "`seconds` must be positive and finite, got nan",
        ),
    ],
)
def test_bad_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call()
