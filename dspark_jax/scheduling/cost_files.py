"""Cost tables on disk: SGLang's two JSON forms, and ours, which knows the context.

Form A (`sample_batch_tokens`, `sample_steps_per_sec`, `max_batch_tokens`) is a
`TokenCurve`; form B (`bias_seconds`, `bs_probes`, `alpha_seconds`, `m_probes`,
`theta_seconds`) an `Additive` without context. Form C has the key `form` =
"dspark_jax.costs" and holds either surface of `Costs`, and what was measured where.
Reading is strict: an unknown key or a wrong value is an error that names the file.
"""

import os

from dspark_jax.scheduling.costs import Additive, Costs, Surface

FORM = "dspark_jax.costs"
VERSION = 1


def read(path: str | os.PathLike) -> Costs:
    """Reads a cost table of any of the three forms.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it is damaged or of none of the forms; the message names the file.
    """
    raise NotImplementedError


def write(path: str | os.PathLike, costs: Costs) -> None:
    """Writes form C, atomically: everything that `costs` holds."""
    raise NotImplementedError


def write_curve(
    path: str | os.PathLike,
    costs: Surface,
    packed_tokens: tuple[int, ...],
    *,
    requests: int = 1,
    context_tokens: float = 0,
) -> None:
    """Writes form A, read off any costs at these probes, atomically."""
    raise NotImplementedError


def write_additive(
    path: str | os.PathLike, costs: Additive, *, context_tokens: float = 0
) -> None:
    """Writes form B, atomically; the context's share at `context_tokens` goes to t0."""
    raise NotImplementedError
