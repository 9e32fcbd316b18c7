"""Ratios of runs that took turns, with their 95 % bounds."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

# Student's t, two-sided 95 %, by degrees of freedom from 1 on.
_T = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


class Ratio(NamedTuple):
    """Geometric mean of paired ratios and its 95 % interval; None for one pair."""

    mean: float
    low: float | None
    high: float | None


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """ours / theirs, pair by pair, by the t interval of the logarithms.

    >>> ratio([2.0, 2.0, 2.0], [1.0, 1.0, 1.0])
    Ratio(mean=2.0, low=2.0, high=2.0)

    Args:
      ours, theirs: [n], positive, of the same trials; beyond 30 degrees of freedom the
        quantile is that of 30, so the interval is a little wide.
    """
    if len(ours) != len(theirs) or len(ours) == 0:
        raise ValueError(
            f"`ours` and `theirs` must be pairs, got {len(ours)} and {len(theirs)}"
        )
    logs = np.log(np.asarray(ours, float) / np.asarray(theirs, float))
    mean = float(np.exp(logs.mean()))
    if len(logs) == 1:
        return Ratio(mean, None, None)
    quantile = _T[min(len(logs) - 1, len(_T)) - 1]
    half = quantile * logs.std(ddof=1) / np.sqrt(len(logs))
    low, high = np.exp(logs.mean() - half), np.exp(logs.mean() + half)
    return Ratio(mean, float(low), float(high))
