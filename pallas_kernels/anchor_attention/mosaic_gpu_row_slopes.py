"""The multiplying half of a worker of `mosaic_gpu_rows`; the notation is there."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.anchor_attention import mosaic_gpu_tiles as tiles_lib
from pallas_kernels.anchor_attention.mosaic_gpu_plan import ROWS
from pallas_kernels.anchor_attention.mosaic_gpu_products import Term, products
from pallas_kernels.anchor_attention.mosaic_gpu_tiles import load


def write_delta(mine, target):
    """Rows of dO * O, to shared memory and to memory."""
    slopes = load(mine["slopes"], layout=plgpu.Layout.WGMMA).astype(jnp.float32)
    out = load(mine["spare"], layout=plgpu.Layout.WGMMA).astype(jnp.float32)
    mine["delta"][...] = jnp.sum(slopes * out, axis=1)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(mine["delta"], target)


def own_slopes(mine, tile, row_blocks, key_blocks, write, targets, scale, interpret):
    """Gradients of the own keys and values, with a row of the tile for each."""
    dtype, width = mine["query"].dtype, mine["query"].shape[1]
    square = (ROWS, ROWS)
    seen = tiles_lib.over_rows(
        load(key_blocks.at[tile], layout=tiles_lib.by_row()), square
    ) == tiles_lib.over_columns(
        load(row_blocks.at[tile], layout=tiles_lib.by_column()), square
    )
    score, slope = products(
        [
            Term(mine["keys"].at[own_rows()], mine["query"].transpose((1, 0)), square),
            Term(
                mine["values"].at[own_rows()], mine["slopes"].transpose((1, 0)), square
            ),
        ],
        interpret=interpret,
    )
    sums = load(mine["sums"], layout=tiles_lib.by_column())
    delta = load(mine["delta"], layout=tiles_lib.by_column())
    weight = tiles_lib.weights(score, scale, sums, tiles_lib.over_columns)
    weight = jnp.where(seen, weight, 0.0)
    slope = weight * (slope - tiles_lib.over_columns(delta, square))
    for left, right, factor, target in (
        (weight, "slopes", 1.0, targets[1]),
        (slope, "query", scale, targets[0]),
    ):
        (found,) = products(
            [Term(left.astype(dtype), mine[right], (ROWS, width))],
            interpret=interpret,
        )
        plgpu.wait_smem_to_gmem(0)
        mine["spare"][...] = (found * jnp.float32(factor)).astype(dtype)
        plgpu.commit_smem()
        write(target)


def own_rows() -> Any:
    """Of a buffer of the ring, those that the own blocks take."""
    return pl.ds(0, ROWS)


def own_part(mine, tile, row_blocks, key_blocks, scale, interpret):
    """dQ of the own keys."""
    dtype, width = mine["query"].dtype, mine["query"].shape[1]
    square = (ROWS, ROWS)
    seen = tiles_lib.over_rows(
        load(row_blocks.at[tile], layout=tiles_lib.by_row()), square
    ) == tiles_lib.over_columns(
        load(key_blocks.at[tile], layout=tiles_lib.by_column()), square
    )
    keys, values = mine["keys"].at[own_rows()], mine["values"].at[own_rows()]
    weight, slope = _weights(mine, keys, values, square, scale, interpret)
    slope = jnp.where(seen, weight * slope, 0.0)
    (acc,) = products(
        [Term(slope.astype(dtype), keys, (ROWS, width))], interpret=interpret
    )
    return acc


def _weights(mine, keys, values, shape, scale, interpret):
    """P, and dO V^T - delta."""
    score, slope = products(
        [
            Term(mine["query"], keys.transpose((1, 0)), shape),
            Term(mine["slopes"], values.transpose((1, 0)), shape),
        ],
        interpret=interpret,
    )
    sums = load(mine["sums"], layout=tiles_lib.by_row())
    delta = load(mine["delta"], layout=tiles_lib.by_row())
    weight = tiles_lib.weights(score, scale, sums, tiles_lib.over_rows)
    return weight, slope - tiles_lib.over_rows(delta, shape)


def context_part(acc, mine, limit, low, count, scratch, config, scale, interpret):
    """dQ, carried on over the context."""
    key_tile, stages = config.row_key_tile, config.row_stages
    shape = (ROWS, key_tile)

    def step(number, acc, *, is_masked):
        buffer = jax.lax.rem(number, stages)
        plgpu.barrier_wait(scratch["keys_filled"].at[buffer])
        plgpu.barrier_wait(scratch["values_filled"].at[buffer])
        keys, values = scratch["keys"].at[buffer], scratch["values"].at[buffer]
        weight, slope = _weights(mine, keys, values, shape, scale, interpret)
        plgpu.barrier_arrive(scratch["values_read"].at[buffer])
        if is_masked:
            at = tiles_lib.positions(number * key_tile, shape, 1)
            weight = jnp.where(at < tiles_lib.over_rows(limit, shape), weight, 0.0)
        slope = weight * slope
        (acc,) = products(
            [Term(slope.astype(mine["query"].dtype), keys, acc.shape, acc)],
            interpret=interpret,
        )
        plgpu.barrier_arrive(scratch["keys_read"].at[buffer])
        return acc

    return tiles_lib.over_context(step, acc, low, count, key_tile=key_tile)
