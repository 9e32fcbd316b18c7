"""Ratios of paired runs and their intervals."""

import numpy as np
import pytest

from dspark_jax.evaluation.paired import ratio


def test_the_interval_covers_the_truth_as_often_as_it_says():
    rng = np.random.default_rng(0)
    hits, trials = 0, 2000
    for _ in range(trials):
        noise = rng.normal(size=(2, 5)) * 0.1
        found = ratio(1.3 * np.exp(noise[0]), np.exp(noise[1]))
        hits += found.low <= 1.3 <= found.high
    assert abs(hits / trials - 0.95) < 5 * np.sqrt(0.95 * 0.05 / trials)


def test_one_pair_has_no_interval():
    assert ratio([3.0], [2.0]) == (1.5, None, None)
    with pytest.raises(ValueError, match="must be pairs, got 1 and 2"):
        ratio([1.0], [1.0, 2.0])
    with pytest.raises(ValueError, match="must be pairs, got 0 and 0"):
        ratio([], [])
