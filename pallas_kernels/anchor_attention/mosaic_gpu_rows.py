"""Gradients of the query and of the blocks' own keys and values.

With P = 2^(S - z) from the forward pass's sums z and delta = rows of (dO * O),

    dS = P * (dO V^T - delta);  dQ = dS K;  dK = dS^T Q;  dV = P^T dO

A worker has the tiles of rows that it has in the forward pass, and reads the context in
the same order. A tile holds whole blocks, so that their own keys' and values' gradients
are complete here. Leaves delta for the gradients of the context.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.anchor_attention import mosaic_gpu_row_slopes
from pallas_kernels.anchor_attention import mosaic_gpu_tiles as tiles_lib
from pallas_kernels.anchor_attention.mosaic_gpu_plan import ROWS, Plan, Shape
from pallas_kernels.anchor_attention.mosaic_gpu_tiles import load
from pallas_kernels.anchor_attention.tuning import MosaicGpuConfig


def shared_memory(shape: Shape, config: MosaicGpuConfig) -> int:
    """Bytes of shared memory that a worker allocates."""
    row = 2 * shape.width
    ring = config.row_stages * 2 * config.row_key_tile * row
    rows = config.warpgroups * ROWS * (3 * row + 8)
    return ring + rows + tiles_lib.OVERHEAD


def gradients(
    query: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    own_keys: jax.Array,
    own_values: jax.Array,
    out: jax.Array,
    slopes: jax.Array,
    sums: jax.Array,
    plan: Plan,
    *,
    shape: Shape,
    config: MosaicGpuConfig,
    scale: float,
    interpret: Any,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Gradients of query, own keys and own values; and delta, like `sums`.

    Args:
      query: as in `mosaic_gpu_forward.attend`, and so on.
      keys: as there.
      values: as there.
      own_keys: as there.
      own_values: as there.
      out: the forward pass's output.
      slopes: dO, like `out`.
      sums: of the forward pass.
      plan: tables.
      shape: see there.
      config: see there.
      scale: factor of the scores.
      interpret: parameters of the interpreter.
    """
    warpgroups, dtype = config.warpgroups, query.dtype
    rows = (warpgroups, ROWS, shape.width)
    scratch = {
        "query": tiles_lib.tiled(*rows, dtype=dtype),
        "slopes": tiles_lib.tiled(*rows, dtype=dtype),
        "spare": tiles_lib.tiled(*rows, dtype=dtype),  # the output, then what is stored
        "sums": plgpu.SMEM((warpgroups, ROWS), jnp.float32),
        "delta": plgpu.SMEM((warpgroups, ROWS), jnp.float32),
        "rows_filled": plgpu.Barrier(
            num_arrivals=3 * tiles_lib.row_copies(shape) + 1, num_barriers=warpgroups
        ),
        "own_filled": plgpu.Barrier(
            num_arrivals=2 * shape.blocks, num_barriers=warpgroups
        ),
        "own_keys_read": plgpu.Barrier(num_barriers=warpgroups),
        "own_values_read": plgpu.Barrier(num_barriers=warpgroups),
    }
    scratch |= tiles_lib.key_rings(
        config.row_stages, config.row_key_tile, shape, readers=warpgroups, dtype=dtype
    )
    query_slopes, own_keys_slopes, own_values_slopes, delta = tiles_lib.launch(
        _worker,
        query,
        keys,
        values,
        own_keys,
        own_values,
        out,
        slopes,
        sums,
        plan.blocks,
        plan.limits,
        plan.row_blocks,
        plan.key_blocks,
        jnp.stack([plan.low.reshape(-1), plan.high.reshape(-1)]),
        out_type=(
            jax.ShapeDtypeStruct(query.shape, dtype),
            jax.ShapeDtypeStruct(own_keys.shape, dtype),
            jax.ShapeDtypeStruct(own_values.shape, dtype),
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
    return query_slopes, own_keys_slopes, own_values_slopes, delta


def _worker(
    query,
    keys,
    values,
    own_keys,
    own_values,
    out,
    slopes,
    sums,
    blocks,
    limits,
    row_blocks,
    key_blocks,
    spans,
    query_slopes,
    own_keys_slopes,
    own_values_slopes,
    delta,
    scratch,
    *,
    shape,
    config,
    scale,
    interpret,
):
    warpgroups, key_tile, stages = (
        config.warpgroups,
        config.row_key_tile,
        config.row_stages,
    )
    sequence, head, tile_0 = tiles_lib.unit(
        jax.lax.axis_index("worker"), shape, warpgroups
    )
    high = spans[1, tile_0 + warpgroups - 1]
    count = jax.lax.div(high + key_tile - 1, key_tile)
    role = jax.lax.axis_index("role")

    def own_buffer(me):
        # The ring's last buffers hold the own blocks, before the context needs them.
        return stages - 1 - me

    @pl.when(role == warpgroups)
    def _():
        plgpu.set_max_registers(tiles_lib.READING, action="decrease")
        for me in range(warpgroups):
            for name in ("keys", "values"):
                own = scratch[name].at[own_buffer(me)]
                tiles_lib.clear(own.at[mosaic_gpu_row_slopes.own_rows()])
            if tiles_lib.has_spare_rows(shape):
                for name in ("query", "slopes", "spare"):
                    tiles_lib.clear(scratch[name].at[me])
        plgpu.commit_smem()

        def read_rows(me):
            tile = tile_0 + me
            mine = tiles_lib.blocks_of(blocks, tile, shape)
            barrier = scratch["rows_filled"].at[me]
            for source, name in ((slopes, "slopes"), (out, "spare"), (query, "query")):
                tiles_lib.read_rows(
                    source, head, mine, scratch[name].at[me], barrier, shape
                )
            plgpu.copy_gmem_to_smem(
                sums.at[tile, head], scratch["sums"].at[me], barrier
            )
            for source, name in ((own_keys, "keys"), (own_values, "values")):
                tiles_lib.read_own(
                    source,
                    head,
                    mine,
                    scratch[name].at[own_buffer(me)],
                    scratch["own_filled"].at[me],
                    shape,
                )

        def read_ring(source, name):
            def await_own(me):
                plgpu.barrier_wait(scratch[f"own_{name}_read"].at[me])

            def free(step):
                for me in range(warpgroups):
                    pl.when(step == own_buffer(me))(functools.partial(await_own, me))

            tiles_lib.stream(
                source,
                sequence * shape.kv_heads + head,
                count,
                name,
                scratch,
                stages=stages,
                key_tile=key_tile,
                before=free,
            )
            for me in range(warpgroups):
                pl.when(count <= own_buffer(me))(functools.partial(await_own, me))

        tiles_lib.by_warp(
            functools.partial(read_ring, keys, "keys"),
            functools.partial(read_ring, values, "values"),
            *(functools.partial(read_rows, me) for me in range(warpgroups)),
        )

    @pl.when(role < warpgroups)
    def _():
        plgpu.set_max_registers(tiles_lib.MULTIPLYING, action="increase")
        tile = tile_0 + role
        rows = tiles_lib.blocks_of(blocks, tile, shape)
        limit = load(limits.at[tile], layout=tiles_lib.by_row())
        low = spans[0, tile]
        mine = {
            name: scratch[name].at[role]
            for name in ("query", "slopes", "spare", "sums", "delta")
        }
        mine |= {
            name: scratch[name].at[own_buffer(role)] for name in ("keys", "values")
        }
        plgpu.barrier_wait(scratch["rows_filled"].at[role])
        mosaic_gpu_row_slopes.write_delta(mine, delta.at[tile, head])
        plgpu.barrier_wait(scratch["own_filled"].at[role])
        mosaic_gpu_row_slopes.own_slopes(
            mine,
            tile,
            row_blocks,
            key_blocks,
            lambda target: tiles_lib.write_own(
                mine["spare"], target, head, rows, shape
            ),
            (own_keys_slopes, own_values_slopes),
            scale,
            interpret,
        )
        acc = mosaic_gpu_row_slopes.own_part(
            mine, tile, row_blocks, key_blocks, scale, interpret
        )
        for name in ("own_keys_read", "own_values_read"):
            plgpu.barrier_arrive(scratch[name].at[role])
        acc = mosaic_gpu_row_slopes.context_part(
            acc, mine, limit, low, count, scratch, config, scale, interpret
        )
        plgpu.wait_smem_to_gmem(0)
        mine["spare"][...] = (acc * jnp.float32(scale)).astype(query.dtype)
        plgpu.commit_smem()
        tiles_lib.write_rows(mine["spare"], query_slopes, head, rows, shape)
        plgpu.wait_smem_to_gmem(0)
