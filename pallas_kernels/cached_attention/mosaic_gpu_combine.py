"""Joins the parts in which `mosaic_gpu` read a unit's keys, in one small kernel.

A part's output o_p is normalised, and z_p is the logarithm (base 2) of its softmax
denominator: out = sum_p 2^z_p o_p / sum_p 2^z_p. A worker takes a few columns of one
unit and asks for all parts at once, so that their latencies overlap.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.cached_attention import mosaic_gpu_worker
from pallas_kernels.cached_attention.mosaic_gpu_softmax import FLOOR, ROWS


def columns_a_worker(group: int, width: int) -> int:
    """Columns of a worker: few, but rows must lie at multiples of 128 bytes."""
    return min(max(64 // (group & -group), 16), width)


def combine(
    out: jax.Array,
    parts: jax.Array,
    sums: jax.Array,
    spans: jax.Array,
    *,
    rows: int,
    interpret: Any = None,
) -> jax.Array:
    """`out` [T, G, h, E] with the units filled in that were read in parts.

    Args:
      out: units that one worker read whole are there already; overwritten.
      parts: float32 [P, N', G, 64, E], rows folded.
      sums: float32 [P, N', G, 64].
      spans: int32 [8 + G, N'], the worker's table; its last G rows say how many parts
        a kv head has (the others hold anything); 1 = `out` has it.
      rows: rows of the packed query a tile has at most.
      interpret: parameters of the interpreter.
    """
    _, count, kv_heads, _, width = parts.shape
    group = out.shape[2]
    columns = columns_a_worker(group, width)
    kernel = plgpu.kernel(
        functools.partial(_worker, group=group, rows=rows, columns=columns),
        out_type=(),
        scratch_types=(plgpu.SMEM((ROWS, columns), out.dtype),),
        grid=(count, kv_heads, width // columns),
        grid_names=("tile", "head", "columns"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )
    joined = jax.new_ref(out)
    kernel(parts, sums, spans, joined)
    return joined[...]


def _worker(
    parts: Any,
    sums: Any,
    spans: Any,
    out: Any,
    joined: Any,
    *,
    group: int,
    rows: int,
    columns: int,
) -> None:
    tile, head = jax.lax.axis_index("tile"), jax.lax.axis_index("head")
    where = pl.ds(jax.lax.axis_index("columns") * columns, columns)
    num_parts = spans[mosaic_gpu_worker.NUM_FIELDS + head, tile]
    first_row = spans[mosaic_gpu_worker.FIRST_ROW, tile]
    num_rows = spans[mosaic_gpu_worker.NUM_ROWS, tile]

    @pl.when(num_parts > 1)
    def _():
        acc = _joined(parts, sums, tile, head, where, num_parts)
        joined[...] = acc.astype(joined.dtype)
        plgpu.commit_smem()
        for row in range(rows):

            @pl.when(row < num_rows)
            def _(row=row):
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
