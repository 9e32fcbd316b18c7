"""The additive cost model from measured steps, by least squares without negative parts.

T = t0 + alpha(requests) + theta(packed tokens) + beta * context tokens. Every increment
of alpha and theta from one probe to the next, t0 and beta are at least 0: a step never
gets cheaper by doing more. Errors count relative to the step, so that short steps, of
which there are many, are not drowned by long ones.
"""

import numpy as np

from dspark_jax.scheduling.costs import Additive


def fit_additive(
    requests: np.ndarray,
    packed_tokens: np.ndarray,
    context_tokens: np.ndarray,
    seconds: np.ndarray,
) -> Additive:
    """The additive model nearest to n measured steps; probes are the sizes measured.

    Args:
      requests, packed_tokens, context_tokens: int [n].
      seconds: float [n], positive.
    """
    raise NotImplementedError
