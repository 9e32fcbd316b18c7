"""How good predicted probabilities are: calibration error, AUROC, Brier score.

`predicted` are probabilities [n], `observed` the 0/1 outcomes [n] (here: whether a
prefix of a draft was accepted). Probabilities are clipped to [1e-8, 1 - 1e-8] and
binned by equal widths, as DeepSpec's evaluator does.
"""

from typing import NamedTuple

import numpy as np

NUM_BINS = 20
NUM_FINE_BINS = 1000
EPSILON = 1e-8


class Bins(NamedTuple):
    """A reliability diagram: what was predicted and what came, bin by bin."""

    num_rows: np.ndarray  # int64 [bins]
    predicted: np.ndarray  # float64 [bins], mean of the bin; NaN where it is empty
    observed: np.ndarray  # float64 [bins], share of ones; NaN where it is empty


def calibration_error(
    predicted: np.ndarray, observed: np.ndarray, num_bins: int = NUM_BINS
) -> float:
    """Expected calibration error: Σ_b (n_b / n) |mean predicted - share observed|.

    References:
      Naeini et al. 2015.
    """
    predicted, observed = _check(predicted, observed)
    if not len(predicted):
        return float("nan")
    index = _bin_index(predicted, num_bins)
    gap = np.bincount(index, predicted - observed, minlength=num_bins)
    return float(np.abs(gap).sum() / len(predicted))


def ideal_calibration_error(
    predicted: np.ndarray,
    num_bins: int = NUM_BINS,
    *,
    num_draws: int = 100,
    seed: int = 0,
) -> float:
    """The error that a perfect predictor of these probabilities shows at this n.

    Outcomes are drawn from the predictions themselves, `num_draws` times. Even then the
    error is positive, of order sqrt(bins / n): an error near this value cannot be told
    from none. Draws are independent; rounds of one text are less so, and their ideal
    error is a little larger.
    """
    predicted, _ = _check(predicted, np.zeros(len(predicted)))
    if not len(predicted):
        return float("nan")
    order = np.argsort(_bin_index(predicted, num_bins), kind="stable")
    predicted = predicted[order]
    index = _bin_index(predicted, num_bins)
    starts = np.flatnonzero(np.diff(index, prepend=-1))
    expected = np.add.reduceat(predicted, starts)
    random = np.random.default_rng(seed)
    errors = []
    for _ in range(num_draws):
        came = random.random(len(predicted)) < predicted
        gap = np.add.reduceat(came.astype(np.float64), starts) - expected
        errors.append(np.abs(gap).sum() / len(predicted))
    return float(np.mean(errors))


def auroc(
    predicted: np.ndarray, observed: np.ndarray, num_bins: int = NUM_FINE_BINS
) -> float:
    """P(a one is predicted higher than a zero), ties within a fine bin counted half.

    NaN if all outcomes are equal.

    References:
      Hanley and McNeil 1982.
    """
    predicted, observed = _check(predicted, observed)
    index = _bin_index(predicted, num_bins)
    ones = np.bincount(index, observed, minlength=num_bins)
    zeros = np.bincount(index, 1 - observed, minlength=num_bins)
    pairs = ones.sum() * zeros.sum()
    if pairs == 0:
        return float("nan")
    below = np.cumsum(zeros) - zeros
    return float(np.sum(ones * (below + zeros / 2)) / pairs)


def brier_score(predicted: np.ndarray, observed: np.ndarray) -> float:
    """Mean squared difference of prediction and outcome; NaN for no rows."""
    predicted, observed = _check(predicted, observed)
    if not len(predicted):
        return float("nan")
    return float(np.mean((predicted - observed) ** 2))


def reliability_bins(
    predicted: np.ndarray, observed: np.ndarray, num_bins: int = NUM_BINS
) -> Bins:
    """The reliability diagram of Figure 6."""
    predicted, observed = _check(predicted, observed)
    index = _bin_index(predicted, num_bins)
    count = np.bincount(index, minlength=num_bins)
    with np.errstate(invalid="ignore"):
        return Bins(
            num_rows=count,
            predicted=np.bincount(index, predicted, minlength=num_bins) / count,
            observed=np.bincount(index, observed, minlength=num_bins) / count,
        )


def _check(
    predicted: np.ndarray, observed: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    predicted = np.asarray(predicted, np.float64)
    observed = np.asarray(observed, np.float64)
    if predicted.ndim != 1 or observed.shape != predicted.shape:
        raise ValueError(
            "`predicted` and `observed` must both have shape (n,), got "
            f"{predicted.shape} and {observed.shape}"
        )
    if not np.all((predicted >= 0) & (predicted <= 1)):
        raise ValueError("`predicted` must hold probabilities in [0, 1]")
    if not np.all((observed == 0) | (observed == 1)):
        raise ValueError("`observed` must hold zeros and ones")
    return np.clip(predicted, EPSILON, 1 - EPSILON), observed


def _bin_index(predicted: np.ndarray, num_bins: int) -> np.ndarray:
    return np.minimum((predicted * num_bins).astype(np.int64), num_bins - 1)
