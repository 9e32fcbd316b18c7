"""The forward kernel of `mosaic_gpu`: FlashAttention with two softmax segments.

A worker has a tile of rows for each of its warpgroups and one kv head. The own blocks
come first, side by side under a mask, then the context's tiles of keys: those that all
rows see whole without a mask, and the last few with one. One more warpgroup reads.
Two warpgroups take turns: one multiplies while the other does its softmax.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.anchor_attention import mosaic_gpu_tiles as tiles_lib
from pallas_kernels.anchor_attention.mosaic_gpu_plan import ROWS, Plan, Shape
from pallas_kernels.anchor_attention.mosaic_gpu_products import Term, products
from pallas_kernels.anchor_attention.mosaic_gpu_tiles import load
from pallas_kernels.anchor_attention.tuning import MosaicGpuConfig


def shared_memory(shape: Shape, config: MosaicGpuConfig) -> int:
    """Bytes of shared memory that a worker allocates."""
    row = 2 * shape.width
    ring = config.stages * 2 * config.key_tile * row
    own = config.warpgroups * 2 * ROWS * row
    rows = config.warpgroups * ROWS * (row + 4)
    return ring + own + rows + tiles_lib.OVERHEAD


def attend(
    query: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    own_keys: jax.Array,
    own_values: jax.Array,
    plan: Plan,
    *,
    shape: Shape,
    config: MosaicGpuConfig,
    scale: float,
    interpret: Any,
) -> tuple[jax.Array, jax.Array]:
    """The output, and the logarithm (base 2) of every row's softmax denominator.

    Args:
      query: [B * A, K, H, E].
      keys: [B * G, S, E].
      values: as keys.
      own_keys: [B * A, K, G, E].
      own_values: as own_keys.
      plan: tables.
      shape: see there.
      config: see there.
      scale: factor of the scores.
      interpret: parameters of the interpreter.

    Returns:
      ([B * A, K, H, E], float32 [B * tiles, G, 64]); a row that sees nothing is zero
      and has infinity.
    """
    warpgroups, dtype = config.warpgroups, query.dtype
    rows = (warpgroups, ROWS, shape.width)
    scratch = {
        "query": tiles_lib.tiled(*rows, dtype=dtype),
        "own_keys": tiles_lib.tiled(*rows, dtype=dtype),
        "own_values": tiles_lib.tiled(*rows, dtype=dtype),
        "sums": plgpu.SMEM((warpgroups, ROWS), jnp.float32),
        "rows_filled": plgpu.Barrier(
            num_arrivals=tiles_lib.row_copies(shape) + 2 * shape.blocks,
            num_barriers=warpgroups,
        ),
        "turn": plgpu.Barrier(num_arrivals=warpgroups),
    }
    scratch |= tiles_lib.key_rings(
        config.stages, config.key_tile, shape, readers=warpgroups, dtype=dtype
    )
    spans = jnp.stack([plan.low.reshape(-1), plan.high.reshape(-1)])
    out, sums = tiles_lib.launch(
        _worker,
        query,
        keys,
        values,
        own_keys,
        own_values,
        plan.blocks,
        plan.limits,
        plan.row_blocks,
        plan.key_blocks,
        spans,
        out_type=(
            jax.ShapeDtypeStruct(query.shape, dtype),
            tiles_lib.vector_shape(shape),
        ),
        scratch=scratch,
        workers=shape.batch * shape.kv_heads * (shape.tiles // warpgroups),
        warpgroups=warpgroups,
        interpret=interpret,
        shape=shape,
        config=config,
        scale=scale,
    )
    return out, sums


def _worker(
    query,
    keys,
    values,
    own_keys,
    own_values,
    blocks,
    limits,
    row_blocks,
    key_blocks,
    spans,
    out,
    sums,
    scratch,
    *,
    shape,
    config,
    scale,
    interpret,
):
    warpgroups, key_tile = config.warpgroups, config.key_tile
    sequence, head, tile_0 = tiles_lib.unit(
        jax.lax.axis_index("worker"), shape, warpgroups
    )
    # Tiles ascend: the last one sees the most.
    high = spans[1, tile_0 + warpgroups - 1]
    count = jax.lax.div(high + key_tile - 1, key_tile)
    role = jax.lax.axis_index("role")

    @pl.when(role == warpgroups)
    def _():
        plgpu.set_max_registers(tiles_lib.READING, action="decrease")
        for me in range(warpgroups):
            # Scores of masked rows and keys may be anything.
            tiles_lib.clear(scratch["own_values"].at[me])
        plgpu.commit_smem()

        def read_rows(me):
            mine = tiles_lib.blocks_of(blocks, tile_0 + me, shape)
            barrier = scratch["rows_filled"].at[me]
            tiles_lib.read_rows(
                query, head, mine, scratch["query"].at[me], barrier, shape
            )
            for source, name in ((own_keys, "own_keys"), (own_values, "own_values")):
                tiles_lib.read_own(
                    source, head, mine, scratch[name].at[me], barrier, shape
                )

        def read_ring(source, name):
            tiles_lib.stream(
                source,
                sequence * shape.kv_heads + head,
                count,
                name,
                scratch,
                stages=config.stages,
                key_tile=key_tile,
            )

        tiles_lib.by_warp(
            functools.partial(read_ring, keys, "keys"),
            functools.partial(read_ring, values, "values"),
            *(functools.partial(read_rows, me) for me in range(warpgroups)),
        )

    @pl.when(role < warpgroups)
    def _():
        plgpu.set_max_registers(tiles_lib.MULTIPLYING, action="increase")
        tile = tile_0 + role
        mine = tiles_lib.blocks_of(blocks, tile, shape)
        row_block = load(row_blocks.at[tile], layout=tiles_lib.by_row())
        limit = load(limits.at[tile], layout=tiles_lib.by_row())
        low = spans[0, tile]
        carry = _own(
            role, tile, row_block, key_blocks, scratch, shape, scale, interpret
        )
        carry = _context(
            role, carry, limit, low, count, scratch, shape, config, scale, interpret
        )
        _write(role, tile, head, mine, row_block, carry, out, sums, scratch, shape)


def _own(me, tile, row_block, key_blocks, scratch, shape, scale, interpret):
    """The softmax over the blocks' own keys: (output, maximum, denominator)."""
    plgpu.barrier_wait(scratch["rows_filled"].at[me])
    own = load(key_blocks.at[tile], layout=tiles_lib.by_column())
    (score,) = products(
        [
            Term(
                scratch["query"].at[me],
                scratch["own_keys"].at[me].transpose((1, 0)),
                (ROWS, ROWS),
            )
        ],
        interpret=interpret,
    )
    seen = tiles_lib.over_rows(row_block, score.shape) == tiles_lib.over_columns(
        own, score.shape
    )
    score = jnp.where(seen, score * jnp.float32(scale * tiles_lib.LOG2E), -jnp.inf)
    largest = jnp.maximum(jnp.max(score, axis=1), tiles_lib.FLOOR)
    weight = jnp.exp2(score - tiles_lib.over_rows(largest, score.shape))
    total = jnp.sum(weight, axis=1)
    (acc,) = products(
        [
            Term(
                weight.astype(scratch["query"].dtype),
                scratch["own_values"].at[me],
                (ROWS, shape.width),
            )
        ],
        interpret=interpret,
    )
    return acc, largest, total


def _context(me, carry, limit, low, count, scratch, shape, config, scale, interpret):
    """The same softmax, carried on over the context."""
    key_tile, stages = config.key_tile, config.stages
    to_log2 = jnp.float32(scale * tiles_lib.LOG2E)
    takes_turns = config.takes_turns and config.warpgroups == 2

    def change_turns():
        if takes_turns:
            plgpu.barrier_arrive(scratch["turn"])
            plgpu.barrier_wait(scratch["turn"])

    def step(number, carry, *, is_masked):
        acc, largest, total = carry
        buffer = jax.lax.rem(number, stages)
        (score,) = products(
            [
                Term(
                    scratch["query"].at[me],
                    scratch["keys"].at[buffer].transpose((1, 0)),
                    (ROWS, key_tile),
                )
            ],
            interpret=interpret,
            during=change_turns,
        )
        plgpu.barrier_arrive(scratch["keys_read"].at[buffer])
        if is_masked:
            at = tiles_lib.positions(number * key_tile, score.shape, 1)
            seen = at < tiles_lib.over_rows(limit, score.shape)
            score = jnp.where(seen, score, -jnp.inf)
        new = jnp.maximum(largest, jnp.max(score, axis=1) * to_log2)
        decay = jnp.exp2(largest - new)
        weight = jnp.exp2(score * to_log2 - tiles_lib.over_rows(new, score.shape))
        acc = acc * tiles_lib.over_rows(decay, acc.shape)
        total = total * decay + jnp.sum(weight, axis=1)
        narrow = weight.astype(scratch["query"].dtype)
        if takes_turns:
            # Holds the softmax together on this side of the barrier.
            acc, total, new, narrow = jax.lax.optimization_barrier(
                (acc, total, new, narrow)
            )
            plgpu.barrier_arrive(scratch["turn"])
        plgpu.barrier_wait(scratch["values_filled"].at[buffer])
        if takes_turns:
            plgpu.barrier_wait(scratch["turn"])

        def await_next():
            @pl.when(number + 1 < count)
            def _():
                plgpu.barrier_wait(
                    scratch["keys_filled"].at[jax.lax.rem(number + 1, stages)]
                )

        (acc,) = products(
            [Term(narrow, scratch["values"].at[buffer], acc.shape, acc)],
            interpret=interpret,
            during=await_next,
        )
        plgpu.barrier_arrive(scratch["values_read"].at[buffer])
        return acc, new, total

    @pl.when(count > 0)
    def _():
        plgpu.barrier_wait(scratch["keys_filled"].at[0])

    pl.when(me == 1)(change_turns)
    carry = tiles_lib.over_context(step, carry, low, count, key_tile=key_tile)
    pl.when(me == 0)(change_turns)
    return carry


def _write(me, tile, head, mine, row_block, carry, out, sums, scratch, shape):
    acc, largest, total = carry
    is_row = (row_block >= 0) & (total > 0)
    # A dropped block's rows are zero, whatever they were.
    acc = jnp.where(
        tiles_lib.over_rows(is_row, acc.shape),
        acc * tiles_lib.over_rows(1 / jnp.where(total > 0, total, 1.0), acc.shape),
        0.0,
    )
    stored = scratch["query"].at[me]  # which has been multiplied
    stored[...] = acc.astype(stored.dtype)
    logarithm = largest + jnp.log2(jnp.where(total > 0, total, 1.0))
    scratch["sums"].at[me][...] = jnp.where(is_row, logarithm, jnp.inf)
    plgpu.commit_smem()
    tiles_lib.write_rows(stored, out, head, mine, shape)
    plgpu.copy_smem_to_gmem(scratch["sums"].at[me], sums.at[tile, head])
    plgpu.wait_smem_to_gmem(0)
