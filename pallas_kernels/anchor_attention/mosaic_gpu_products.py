"""Products of tiles on the tensor cores, and the same in the interpreter.

The interpreter (JAX 0.12) knows neither accumulators that start with a value nor left
operands in registers. There such a product is an ordinary one of the same numbers.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu


class Term(NamedTuple):
    """`left @ right`, added to `total` if there is one."""

    left: Any  # a reference, or an array
    right: Any  # a reference
    shape: Any  # (rows, columns)
    total: jax.Array | None = None


def products(
    terms: Sequence[Term],
    *,
    interpret: bool,
    during: Callable[[], None] | None = None,
) -> list[jax.Array]:
    """All terms in float32, issued together.

    Args:
      terms: what is multiplied.
      interpret: on the CPU.
      during: called while they run.
    """
    if interpret:
        found = [_interpreted(term) for term in terms]
        if during is not None:
            during()
        return found

    def issue(*refs: Any) -> None:
        for ref, term in zip(refs, terms, strict=True):
            plgpu.wgmma(ref, term.left, term.right)
        if during is not None:
            during()

    if all(term.total is None for term in terms):

        def fresh(*refs: Any) -> list[jax.Array]:
            issue(*refs)
            return [ref[...] for ref in refs]

        return pl.run_scoped(fresh, *(plgpu.ACC(t.shape, jnp.float32) for t in terms))
    started = tuple(
        plgpu.ACC.init(zeros(t.shape) if t.total is None else t.total) for t in terms
    )
    return list(pl.run_state(lambda refs: issue(*refs))(started))


def zeros(shape: tuple[int, ...]) -> jax.Array:
    """An accumulator's start."""
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)


def _interpreted(term: Term) -> jax.Array:
    if isinstance(term.left, jax.Array):
        found = jnp.dot(term.left, term.right[...], preferred_element_type=jnp.float32)
    else:

        def fresh(ref: Any) -> jax.Array:
            plgpu.wgmma(ref, term.left, term.right)
            return ref[...]

        found = pl.run_scoped(fresh, plgpu.ACC(term.shape, jnp.float32))
    return found if term.total is None else term.total + found
