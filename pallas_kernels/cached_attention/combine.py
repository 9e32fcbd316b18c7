"""Joins the parts in which `triton` read a unit's keys.

A part's output o_p is normalised, and z_p is the logarithm (base 2) of its softmax
denominator: out = sum_p 2^z_p o_p / sum_p 2^z_p. Left to XLA, which makes one or two
small kernels of it.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.cached_attention import runs as runs_lib

FLOOR = -3e38  # finite: -inf - FLOOR is -inf and not NaN


def combine(
    outs: jax.Array,
    sums: jax.Array,
    exists: jax.Array,
    spans: runs_lib.Spans,
    dtype: Any,
) -> jax.Array:
    """The output [T, G, h, E] in `dtype`.

    Args:
      outs: float32 [P, T, G, h, E].
      sums: float32 [P, N' * G, rows], in the order of folded rows.
      exists: bool [P, N', G]; what no worker wrote may hold anything.
      spans: the N' tiles of rows.
    """
    count, total, kv_heads, group, _ = outs.shape
    tiles, rows = spans.limits.shape
    tokens = rows // group
    sums = sums.reshape(count, tiles, kv_heads, rows)[..., : tokens * group]
    sums = jnp.where(exists[..., None], sums, -jnp.inf)
    sums = sums.reshape(count, tiles, kv_heads, tokens, group)
    tile, local = runs_lib.place(spans, total, tokens)
    sums = jnp.moveaxis(sums, 2, 3)[:, tile, local]  # [P, T, G, h]
    largest = jnp.maximum(jnp.max(sums, axis=0), FLOOR)
    weights = jnp.exp2(sums - largest[None])
    weights = weights / jnp.maximum(jnp.sum(weights, axis=0), 1e-37)[None]
    weights = weights[..., None]
    outs = jnp.where(weights > 0, outs * weights, 0)
    return jnp.sum(outs, axis=0).astype(dtype)
