"""Verify lengths from confidences and a capacity curve: Algorithm 1 and its ranking.

A request's slot k is worth its survival, the probability that slots 1..k are all
accepted; it costs one more packed token. `plan` walks the slots of all requests by
falling survival and stops at the first that does not raise the throughput
τ · steps_per_second (paper, Algorithm 1). The stop keeps the walk causal: whether slot
k is bought never depends on the token that it would verify, so live confidences are
allowed. `allocate` hands out a number of slots that was decided before.
"""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What `plan` decided, and the walk that led there.

    Attributes:
      verify_length: int32 [B], drafts of each request to verify.
      throughput: expected tokens a second at those lengths.
      visited: int64 [n, 2], the (request, slot) pairs in the order they were tried; the
        last one was refused unless all were bought.
      visited_throughput: float64 [n], tokens a second with each of them.
    """

    verify_length: np.ndarray
    throughput: float
    visited: np.ndarray
    visited_throughput: np.ndarray


def plan(confidence: np.ndarray, steps_per_second: np.ndarray) -> Plan:
    """Algorithm 1 with its early stop: lengths that raise throughput step by step.

    Equal survivals go by slot, then by request. On a curve whose step time is convex in
    the packed tokens no other lengths have a higher throughput; on others the result is
    never below that of no drafts at all.

    Args:
      confidence: [B, K], each slot's, given that the slots before survive; 0 where a
        request has no draft. Live ones are allowed.
      steps_per_second: [n], at each number of packed tokens; index 0..B-1 is not read,
        and n must be above B plus the number of slots with a positive survival.

    Raises:
      ValueError: a confidence outside [0, 1], or a curve that is too short, not
        positive or not finite.

    References:
      DSpark (arXiv 2607.05147), Algorithm 1 and appendix A.
    """
    alive = survival(confidence)
    rows = len(alive)
    curve = np.asarray(steps_per_second, np.float64)
    order = _ranking(alive)
    gains = alive.T.reshape(-1)[order]
    if curve.ndim != 1 or len(curve) <= rows + len(gains):
        raise ValueError(
            "`steps_per_second` must have shape (n,), n > B + slots = "
            f"{rows + len(gains)}, got {curve.shape}"
        )
    curve = curve[rows : rows + len(gains) + 1]
    is_speed = (curve > 0) & np.isfinite(curve)
    if not np.all(is_speed):
        worst = float(curve[~is_speed][0])
        raise ValueError(
            "`steps_per_second` must be positive and finite from index B on, got "
            f"{worst}"
        )
    # One addition after the other, as the algorithm does: the same rounding.
    throughput = np.cumsum(np.concatenate([[float(rows)], gains])) * curve
    rises = throughput[1:] > throughput[:-1]
    bought = len(rises) if rises.all() else int(np.argmin(rises))
    tried = order[: bought + 1]
    visited = np.stack([tried % rows, tried // rows], axis=1)
    lengths = np.bincount(visited[:bought, 0], minlength=rows)
    return Plan(
        verify_length=lengths.astype(np.int32),
        throughput=float(throughput[bought]),
        visited=visited,
        visited_throughput=throughput[1 : len(tried) + 1],
    )


def survival(confidence: np.ndarray) -> np.ndarray:
    """Probabilities [B, K] that slots 1..k all pass: the running product, float64.

    A confidence that is not finite counts as 0, and so does what follows it.

    >>> survival(np.array([[0.5, 0.5], [np.nan, 1.0]])).tolist()
    [[0.5, 0.25], [0.0, 0.0]]

    Raises:
      ValueError: not a matrix with at least one row, or a value outside [0, 1].
    """
    confidence = np.asarray(confidence, np.float64)
    if confidence.ndim != 2 or not len(confidence):
        raise ValueError(
            f"`confidence` must have shape (B, K), B >= 1, got {confidence.shape}"
        )
    return np.cumprod(finite(confidence), axis=1)


def finite(confidence: np.ndarray) -> np.ndarray:
    """Confidences, 0 where one is not finite; raises ValueError outside [0, 1]."""
    confidence = np.where(np.isfinite(confidence), confidence, 0.0)
    is_outside = (confidence < 0) | (confidence > 1)
    if np.any(is_outside):
        worst = float(confidence[is_outside][0])
        raise ValueError(f"`confidence` must lie in [0, 1], got {worst}")
    return confidence


def allocate(survival: np.ndarray, budget: int) -> np.ndarray:
    """Verify lengths [B] int32: the `budget` slots with the highest survival.

    The reference of `dspark_jax.decoding.windows.allocate`, which runs inside a step.
    Equal survivals go by slot, then by request. A slot whose survival is 0 or not
    finite is never verified, nor is one after it.

    Args:
      survival: [B, K], not increasing along K (a rise is ignored), compared in float32.
      budget: drafts to verify over all requests, at least 0.
    """
    survival = np.asarray(survival, np.float32)
    if survival.ndim != 2:
        raise ValueError(f"`survival` must have shape (B, K), got {survival.shape}")
    if budget < 0:
        raise ValueError(f"`budget` must be at least 0, got {budget}")
    alive = np.where(np.isfinite(survival), survival, np.float32(0))
    # Devices take numbers below the normal ones for 0.
    alive = np.where(alive < np.finfo(np.float32).tiny, np.float32(0), alive)
    alive = np.minimum.accumulate(alive, axis=1)
    winners = _ranking(alive)[:budget]
    return np.bincount(winners % len(alive), minlength=len(alive)).astype(np.int32)


def _ranking(alive: np.ndarray) -> np.ndarray:
    """Indices into [K, B] of positive survivals: highest, then slot, then request."""
    flat = alive.T.reshape(-1)
    order = np.argsort(-flat, kind="stable")
    return order[: int(np.count_nonzero(flat > 0))]
