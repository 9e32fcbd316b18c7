"""How many drafts a step verifies, from confidences of earlier steps.

A compiled program has a fixed number of packed tokens, so only a few totals can be
realised, and step times jump between them. `budget` compares all of them, with no early
stop (paper 5.2). Such a search would bias the output if it saw the block whose fate it
decides (appendix A): it takes a `PastConfidence`, which only the relay makes and which
carries the step that it came from.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np

from dspark_jax.scheduling.relay import PastConfidence

MARGIN = 0.01  # a predicted gain below it is within what predictions miss by
# Drafting rounds draw more power than plain ones, and at its power limit a card lowers
# its clock for all that it does. Qwen3-4B's shapes, 128 requests on an H200 (700 W):
# rounds that brought 5 % more words a second left the prefill steps between them 13 %
# slower, and the whole 3.6 % slower than plain decoding. Where prefill takes two fifths
# of the time, as there, a gain of 8 % in rounds is level (docs/serving.md, "Measured").
PLAIN_MARGIN = 0.08


@dataclasses.dataclass(frozen=True, kw_only=True)
class Budget:
    """What the next step runs, and what that should bring.

    Attributes:
      num_drafts: drafts to verify over all requests: all that the bucket holds. Hand it
        to `allocate`.
      packed_tokens: the bucket; B for a step that drafts nothing.
      is_drafting: False: run the step without a draft.
      seconds: predicted duration of the step.
      expected_tokens: predicted τ summed over requests.
      throughput: expected_tokens / seconds.
      full_throughput, plain_throughput: the same for full windows (the largest bucket
        that they need) and for no draft; NaN where there is no such option.
    """

    num_drafts: int
    packed_tokens: int
    is_drafting: bool
    seconds: float
    expected_tokens: float
    throughput: float
    full_throughput: float
    plain_throughput: float


def budget(
    past: PastConfidence,
    *,
    step: int,
    buckets: Sequence[int] | np.ndarray,
    seconds: np.ndarray,
    plain_seconds: float | None = None,
    margin: float = MARGIN,
    plain_margin: float = PLAIN_MARGIN,
    must_draft: bool = False,
    max_verify_length: np.ndarray | None = None,
    other_tokens: int = 0,
) -> Budget:
    """The realisable number of drafts with the highest predicted throughput.

    Compares τ(bucket) / seconds(bucket) over the buckets, where τ is B plus the highest
    survivals that fit, and B / plain_seconds. Shortened windows are chosen only if they
    beat full ones by `margin`, and drafting only if it beats no draft by
    `plain_margin`. Ties go to no draft, then to full windows, then to fewer tokens.

    Args:
      past: of the B requests of this step, from `ConfidenceRelay.read`.
      step: the step being planned; every row of `past` must come from an earlier one.
      buckets: packed tokens of the compiled speculative programs, strictly increasing.
        Those that cannot hold B + other_tokens are left out; one must remain.
      seconds: [n], duration of a whole speculative step at each bucket, draft included.
      plain_seconds: of a step without a draft; None: there is no such program.
      must_draft: leaves out the step without a draft (a probe: its confidences show
        whether drafting pays again).
      max_verify_length: int [B], what limits leave of each window; None: all of it.
      other_tokens: packed tokens that are taken by something else (prefill chunks).

    Raises:
      TypeError: `past` is not a `PastConfidence`.
      ValueError: it does not lie at least one step back, or a size or cost is out of
        range.
    """
    if not isinstance(past, PastConfidence):
        raise TypeError(
            "`past` must be a PastConfidence, which ConfidenceRelay.read makes from "
            f"earlier steps (live confidences bias the output), got {type(past)}"
        )
    if past.newest_step >= step:
        raise ValueError(
            f"`past` must lie at least one step before step {step}, got confidences of "
            f"step {past.newest_step}"
        )
    sizes, costs = _check(buckets, seconds, plain_seconds, other_tokens)
    for name, share in (("margin", margin), ("plain_margin", plain_margin)):
        if not 0 <= share < float("inf"):
            raise ValueError(f"`{name}` must be finite and at least 0, got {share}")
    # Survival (`planner.survival`), of numbers that the relay has checked.
    alive = np.cumprod(past.confidence, axis=1)
    rows, length = alive.shape
    if not rows:
        raise ValueError("`past` must have at least one request, got none")
    if max_verify_length is not None:
        limits = np.asarray(max_verify_length)
        if limits.shape != (rows,):
            raise ValueError(
                f"`max_verify_length` must have shape (B,) = ({rows},), got "
                f"{limits.shape}"
            )
        alive = np.where(np.arange(length)[None] < limits[:, None], alive, 0.0)
    fits = sizes >= rows + other_tokens
    if not fits.any():
        raise ValueError(
            f"`buckets` must hold B + other_tokens = {rows + other_tokens} tokens, the "
            f"largest holds {sizes[-1]}"
        )
    sizes, costs = sizes[fits], costs[fits]
    gains = np.zeros(alive.size + 1)
    np.cumsum(np.sort(alive, axis=None)[::-1], out=gains[1:])
    drafts = np.minimum(sizes - rows - other_tokens, rows * length)
    tokens = rows + gains[drafts]
    throughput = tokens / costs
    best = int(np.argmax(throughput))  # the first maximum: fewer tokens
    full = _full(drafts)
    plain = float("nan")
    if plain_seconds is not None:
        plain = rows / plain_seconds
    if best != full and not throughput[best] > throughput[full] * (1 + margin):
        best = full
    # True where there is no plain step.
    is_drafting = must_draft or not plain * (1 + plain_margin) >= throughput[best]
    return Budget(
        num_drafts=int(drafts[best]) if is_drafting else 0,
        packed_tokens=int(sizes[best]) if is_drafting else rows + other_tokens,
        is_drafting=is_drafting,
        seconds=float(costs[best]) if is_drafting else float(plain_seconds or 0.0),
        expected_tokens=float(tokens[best]) if is_drafting else float(rows),
        throughput=float(throughput[best]) if is_drafting else plain,
        full_throughput=float(throughput[full]),
        plain_throughput=plain,
    )


def _full(drafts: np.ndarray) -> int:
    """The first bucket that holds all drafts, else the largest."""
    return int(np.argmax(drafts))


def _check(
    buckets: Sequence[int] | np.ndarray,
    seconds: np.ndarray,
    plain_seconds: float | None,
    other_tokens: int,
) -> tuple[np.ndarray, np.ndarray]:
    sizes, costs = np.asarray(buckets), np.asarray(seconds, np.float64)
    if sizes.ndim != 1 or not len(sizes) or sizes.dtype.kind not in "iu":
        raise ValueError(f"`buckets` must be integers (n,), n >= 1, got {buckets!r}")
    # A few numbers, checked every turn of an engine: lists are faster than arrays.
    values = sizes.tolist()
    if values[0] < 1 or any(a >= b for a, b in itertools.pairwise(values)):
        raise ValueError(
            f"`buckets` must be positive and strictly increasing, got {values}"
        )
    if costs.shape != sizes.shape:
        raise ValueError(
            f"`seconds` must have one value a bucket, ({len(sizes)},), got "
            f"{costs.shape}"
        )
    given = costs.tolist()
    if plain_seconds is not None:
        given.append(float(plain_seconds))
    if not all(0 < value < math.inf for value in given):
        raise ValueError(
            f"`seconds` and `plain_seconds` must be positive and finite, got {given}"
        )
    if other_tokens < 0:
        raise ValueError(f"`other_tokens` must be at least 0, got {other_tokens}")
    return sizes.astype(np.int64), costs  # narrow integers may not hold B (K + 1)
