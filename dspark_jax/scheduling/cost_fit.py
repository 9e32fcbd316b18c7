"""The additive cost model from measured steps, by least squares without negative parts.

T = t0 + alpha(requests) + theta(packed tokens) + beta * context tokens. Every increment
of alpha and theta from one probe to the next, t0 and beta are at least 0: a step never
gets cheaper by doing more. Errors count relative to the step, so that short steps, of
which there are many, are not drowned by long ones.
"""

import numpy as np

from dspark_jax.scheduling.costs import Additive

SMALLEST = 1e-9  # seconds; t0 must be positive in SGLang's form


def fit_additive(
    requests: np.ndarray,
    packed_tokens: np.ndarray,
    context_tokens: np.ndarray,
    seconds: np.ndarray,
) -> Additive:
    """The additive model nearest to n measured steps; probes are the sizes measured.

    Sizes that always occur together cannot be told apart (every step of 8 requests with
    64 tokens, say): their sum is right, its parts are one choice of many.

    Args:
      requests, packed_tokens, context_tokens: int [n].
      seconds: float [n], positive.

    Raises:
      ValueError: shapes that do not fit one another, or a value out of range.
    """
    values = np.asarray(seconds, np.float64)
    if values.ndim != 1 or not len(values):
        raise ValueError(f"`seconds` must have shape (n,), n >= 1, got {values.shape}")
    if not np.all((values > 0) & np.isfinite(values)):
        raise ValueError("`seconds` must be positive and finite")
    axes = {}
    for name, given, low in (
        ("requests", requests, 1),
        ("packed_tokens", packed_tokens, 1),
        ("context_tokens", context_tokens, 0),
    ):
        axis = axes[name] = np.asarray(given)
        if axis.shape != values.shape:
            raise ValueError(
                f"`{name}` must have shape (n,) = ({len(values)},), got {axis.shape}"
            )
        if not np.issubdtype(axis.dtype, np.integer) or axis.min() < low:
            raise ValueError(f"`{name}` must hold integers of at least {low}")
    rows, row_steps = _increments(axes["requests"])
    tokens, token_steps = _increments(axes["packed_tokens"])
    context = axes["context_tokens"].astype(np.float64)
    scale = max(context.max(), 1.0)  # columns of like size
    columns = [np.ones((len(values), 1)), row_steps, token_steps]
    design = np.concatenate([*columns, context[:, None] / scale], axis=1)
    found = non_negative_least_squares(design / values[:, None], np.ones(len(values)))
    alpha, theta = np.split(found[1:-1], [len(rows) - 1])
    return Additive(
        bias_seconds=max(float(found[0]), SMALLEST),
        requests=tuple(rows),
        alpha_seconds=(0.0, *np.cumsum(alpha).tolist()),
        packed_tokens=tuple(tokens),
        theta_seconds=(0.0, *np.cumsum(theta).tolist()),
        context_seconds=float(found[-1] / scale),
    )


def non_negative_least_squares(matrix: np.ndarray, values: np.ndarray) -> np.ndarray:
    """x >= 0 that minimises |matrix x - values|².

    References:
      Lawson and Hanson 1974, chapter 23.
    """
    size = matrix.shape[1]
    is_free = np.zeros(size, bool)
    found = np.zeros(size)
    gradient = matrix.T @ values
    tolerance = 1e-12 * max(float(np.abs(gradient).max(initial=0.0)), 1e-300)
    for _ in range(10 * size):  # it ends long before; a bound against rounding
        wanting = np.where(is_free, -np.inf, gradient)
        if not np.any(wanting > tolerance):
            break
        is_free[int(np.argmax(wanting))] = True
        while True:
            trial = np.zeros(size)
            trial[is_free] = np.linalg.lstsq(matrix[:, is_free], values)[0]
            below = is_free & (trial <= 0)
            if not below.any():
                break
            step = np.min(
                found[below] / np.maximum(found[below] - trial[below], 1e-300)
            )
            found = found + step * (trial - found)
            is_free &= found > 1e-15 * max(float(found.max()), 1e-300)
            found = np.where(is_free, found, 0.0)
        found = trial
        gradient = matrix.T @ (values - matrix @ found)
    return found


def _increments(axis: np.ndarray) -> tuple[list[int], np.ndarray]:
    """The sizes that occur, and [n, sizes - 1]: which increments each row holds."""
    sizes = np.unique(axis)
    return sizes.tolist(), (axis[:, None] >= sizes[None, 1:]).astype(np.float64)
