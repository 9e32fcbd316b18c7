"""Joins the parts in which workers of `mosaic_gpu` read a unit's keys.

A part's output o_p is normalised, and z_p is the logarithm (base 2) of its softmax
denominator: out = sum_p 2^z_p o_p / sum_p 2^z_p. All parts are asked for at once, so
that their latencies overlap, and a worker takes a few columns only.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.cached_attention.mosaic_gpu_shape import FLOOR


def columns_at_once(group: int, width: int) -> int:
    """Columns of a worker: few, but rows must lie at multiples of 128 bytes."""
    return min(max(64 // (group & -group), 16), width)


def join(
    parts: Any,
    sums: Any,
    out: Any,
    joined: Any,
    *,
    place: tuple[Any, Any, Any],
    num_parts: Any,
    first_row: Any,
    num_rows: Any,
    group: int,
    rows: int,
) -> None:
    """Some columns of a unit's parts, joined, to the output.

    Args:
      parts: float32 [P, N', G, 64, E], rows folded.
      sums: float32 [P, N', G, 64].
      out: [T, G, h, E].
      joined: [64, columns] in shared memory.
      place: the unit's tile of rows and kv head, and the columns.
      num_parts: that exist.
      first_row: of the unit, in the output.
      num_rows: of the unit.
      group: query heads a kv head.
      rows: of a unit at most.
    """
    tile, head, where = place
    acc = _joined(parts, sums, tile, head, where, num_parts)
    plgpu.wait_smem_to_gmem(0)  # what left from the same memory before
    joined[...] = acc.astype(joined.dtype)
    plgpu.commit_smem()
    for row in range(rows):

        @pl.when(row < num_rows)
        def _(row: int = row) -> None:
            plgpu.copy_smem_to_gmem(
                joined.at[pl.ds(row * group, group)],
                out.at[first_row + row, head, :, where],
            )

    plgpu.wait_smem_to_gmem(0)


def _joined(
    parts: Any, sums: Any, tile: Any, head: Any, where: Any, num_parts: Any
) -> jax.Array:
    load = functools.partial(plgpu.load, optimized=False)
    by_row = plgpu.Layout.WGMMA.reduce(1)
    # A part that nobody wrote may hold NaN: the first one is read in its place, with no
    # weight.
    exists = [part < num_parts for part in range(parts.shape[0])]
    index = [jnp.where(there, part, 0) for part, there in enumerate(exists)]
    found = [
        load(parts.at[part, tile, head, :, where], layout=plgpu.Layout.WGMMA)
        for part in index
    ]
    logs = [
        load(sums.at[part, tile, head], layout=by_row)
        + jnp.where(there, jnp.float32(0), jnp.float32(-jnp.inf))
        for part, there in zip(index, exists, strict=True)
    ]
    largest = jnp.maximum(functools.reduce(jnp.maximum, logs), FLOOR)
    weights = [jnp.exp2(log - largest) for log in logs]
    share = functools.reduce(jnp.add, weights)
    share = 1 / jnp.where(share > 0, share, 1.0)
    return functools.reduce(
        jnp.add,
        [
            value * jax.lax.broadcast_in_dim(weight * share, value.shape, [0])
            for value, weight in zip(found, weights, strict=True)
        ],
    )
