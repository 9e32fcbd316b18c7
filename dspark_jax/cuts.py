"""Cuts of a distribution: the smallest logit that top-k, or top-p, keeps.

A token stays if its scaled logit reaches the row's cut, so that equal logits stay or go
together. Cuts are found by bisection over the floats: on a CPU, a sort of the
vocabulary took longer than the target's whole pass.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def top_k(scaled: Float[Array, "... N"], k: Int[Array, "..."]) -> Float[Array, "..."]:
    """The k-th largest value: the largest t with count(scaled >= t) >= k."""
    k = jnp.minimum(k, scaled.shape[-1])

    def reaches(t):
        count = jnp.sum(scaled >= t[..., None], axis=-1, dtype=jnp.int32)
        return count >= k

    return _largest_float(reaches, scaled.shape[:-1])


def top_p(
    scaled: Float[Array, "... N"], cut: Float[Array, "..."], p: Float[Array, "..."]
) -> Float[Array, "..."]:
    """Smallest kept value: token v stays iff the mass strictly above it is < p.

    Mass is that of the tokens at or above `cut`, in all 1. Mass(>= t) >= p holds up to
    some largest t; tokens at or above it stay.
    """
    weight = jnp.where(scaled >= cut[..., None], jnp.exp(scaled), 0.0)
    # Summing in one order everywhere keeps "all of it" equal to the total at p = 1.
    total = jnp.sum(weight, axis=-1)

    def reaches(t):
        mass = jnp.sum(jnp.where(scaled >= t[..., None], weight, 0.0), axis=-1)
        return mass >= p * total

    return _largest_float(reaches, scaled.shape[:-1])


def between(
    scaled: Float[Array, "... N"], cut: Float[Array, "..."]
) -> Float[Array, "..."]:
    """The same cut, half-way between the smallest kept and the largest dropped value.

    A cut found by the searches above equals the smallest kept logit. Compilers round
    `logits / T` differently in different fusions: comparing with that very number would
    drop the token in one place and keep it in another. -inf where nothing is dropped.
    """
    kept = scaled >= cut[..., None]
    low = jnp.max(jnp.where(kept, -jnp.inf, scaled), axis=-1)
    high = jnp.min(jnp.where(kept, scaled, jnp.inf), axis=-1)
    is_cut = low > -jnp.inf
    # Where nothing is dropped, infinities must not meet: `debug_nans` would find it.
    start, end = jnp.where(is_cut, low, 0.0), jnp.where(is_cut, high, 0.0)
    middle = start + 0.5 * (end - start)
    middle = jnp.where(middle > low, middle, high)  # neighbouring floats
    return jnp.where(is_cut, middle, -jnp.inf)


def _largest_float(
    holds: Callable[[jax.Array], jax.Array], shape: tuple[int, ...]
) -> jax.Array:
    """The largest float32 t for which the decreasing predicate `holds(t)` is true.

    Bisects the 32-bit integers that order like floats: 32 steps, exact. -inf where it
    holds nowhere.
    """
    # Keys are uint32 in float order: flip all bits of negatives, the sign of the rest.
    low = jnp.full(shape, 0x007FFFFF, jnp.uint32)  # key of -inf
    high = jnp.full(shape, 0xFF800000, jnp.uint32)  # key of +inf: never holds

    def to_float(keys):
        flipped = jnp.where(keys >> 31 == 1, keys ^ jnp.uint32(0x80000000), ~keys)
        return jax.lax.bitcast_convert_type(flipped, jnp.float32)

    def step(_, bounds):
        low, high = bounds
        middle = low + ((high - low) >> 1)
        keep = holds(to_float(middle))
        return jnp.where(keep, middle, low), jnp.where(keep, high, middle)

    low, _ = jax.lax.fori_loop(0, 32, step, (low, high))
    return to_float(low)
