"""Values at a few probes: checked, made monotone, and what lies between them.

Shared by the cost tables of `costs`.
"""

import bisect
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

# More than these is a damaged table.
MAX_PROBES = 4096  # of one axis
MAX_SIZE = 2**40  # requests or tokens
MAX_SECONDS = 1e9


def interpolate(at: Any, probes: Sequence[int], values: Sequence[float]) -> np.ndarray:
    """Linear between probes, the last slope beyond them, the first value below."""
    at = np.asarray(at, np.float64)
    found = np.interp(at, probes, values)
    beyond = at - probes[-1]
    if len(probes) > 1 and not beyond.max(initial=0) <= 0:  # NaN: of the others, maybe
        slope = (values[-1] - values[-2]) / (probes[-1] - probes[-2])
        found = found + slope * np.maximum(beyond, 0)
    return np.asarray(found)


def isotonic(values: np.ndarray, axis: int = -1) -> np.ndarray:
    """The nearest values, in least squares, that do not fall along `axis`.

    >>> isotonic(np.array([1.0, 3.0, 2.0, 4.0])).tolist()
    [1.0, 2.5, 2.5, 4.0]

    References:
      Barlow et al. 1972 (pool adjacent violators).
    """
    return np.apply_along_axis(_pool, axis, np.asarray(values, np.float64))


def change(before: np.ndarray, after: np.ndarray) -> float:
    """The largest relative difference."""
    return float(np.max(np.abs(after - before) / before))


def check_probes(name: str, probes: Sequence[int], low: int = 1) -> None:
    """Raises ValueError unless the probes are strictly increasing integers >= low."""
    if not 1 <= len(probes) <= MAX_PROBES:
        raise ValueError(
            f"`{name}` must have 1 to {MAX_PROBES} probes, got {len(probes)}"
        )
    if not all(type(probe) is int and low <= probe <= MAX_SIZE for probe in probes):
        raise ValueError(
            f"`{name}` must hold integers of at least {low} and at most 2**40, got "
            f"{shortened(probes)}"
        )
    if any(a >= b for a, b in itertools.pairwise(probes)):
        raise ValueError(
            f"`{name}` must be strictly increasing, got {shortened(probes)}"
        )


def check_seconds(
    name: str, values: Any, shape: tuple[int, ...], may_be_zero: bool = False
) -> None:
    """Raises ValueError unless there is a positive finite number for every probe."""
    rows = values if len(shape) == 2 else (values,)
    lengths = [len(rows)] if len(shape) == 2 else []
    if lengths not in ([], [shape[0]]) or any(len(row) != shape[-1] for row in rows):
        raise ValueError(
            f"`{name}` must have one value a probe, {shape}, got {shortened(values)}"
        )
    for value in (value for row in rows for value in row):
        if not is_finite(value) or value < 0 or (value == 0 and not may_be_zero):
            rule = "at least 0" if may_be_zero else "positive"
            raise ValueError(
                f"`{name}` must hold finite numbers, {rule}, got {shortened(value)}"
            )


def shortened(value: Any) -> str:
    """The value's text, cut after 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def is_finite(value: Any) -> bool:
    """Whether this is a number, and no larger than a step could ever take."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and abs(value) <= MAX_SECONDS


def bracket(at: float, probes: Sequence[int]) -> tuple[int, float]:
    """(i, share): `at` = probe i + share * (probe i+1 - probe i).

    The share is above 1 beyond the last probe and 0 below the first.
    """
    place = min(bisect.bisect_right(probes, at), len(probes) - 1) - 1
    if place < 0:
        return 0, 0.0
    return place, (at - probes[place]) / (probes[place + 1] - probes[place])


def _pool(values: np.ndarray) -> np.ndarray:
    means: list[float] = []
    counts: list[int] = []
    for value in values:
        mean, count = float(value), 1
        while means and means[-1] > mean:
            last, held = means.pop(), counts.pop()
            mean, count = (mean * count + last * held) / (count + held), count + held
        means.append(mean)
        counts.append(count)
    return np.repeat(means, counts)
