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

from pallas_kernels.anchor_attention import mosaic_gpu_tiles as tiles_lib
from pallas_kernels.anchor_attention.mosaic_gpu_plan import ROWS, Plan, Shape
from pallas_kernels.anchor_attention.mosaic_gpu_products import Term, products
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
    ring = (config.row_stages, config.row_key_tile, shape.width)
    filled = plgpu.Barrier(num_barriers=config.row_stages)
    read = plgpu.Barrier(num_arrivals=warpgroups, num_barriers=config.row_stages)
    rows = (warpgroups, ROWS, shape.width)
    scratch = {
        "query": tiles_lib.tiled(*rows, dtype=dtype),
        "slopes": tiles_lib.tiled(*rows, dtype=dtype),
        "spare": tiles_lib.tiled(*rows, dtype=dtype),  # the output, then what is stored
        "keys": tiles_lib.tiled(*ring, dtype=dtype),
        "values": tiles_lib.tiled(*ring, dtype=dtype),
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
        "keys_filled": filled,
        "values_filled": filled,
        "keys_read": read,
        "values_read": read,
    }
    kernel = plgpu.kernel(
        functools.partial(
            _worker,
            shape=shape,
            config=config,
            scale=scale,
            interpret=interpret is not None,
        ),
        out_type=(
            jax.ShapeDtypeStruct(query.shape, dtype),
            jax.ShapeDtypeStruct(own_keys.shape, dtype),
            jax.ShapeDtypeStruct(own_values.shape, dtype),
            tiles_lib.vector_shape(shape),
        ),
        scratch_types=(scratch,),
        grid=(shape.batch * shape.kv_heads * (shape.tiles // warpgroups),),
        grid_names=("worker",),
        num_threads=warpgroups + 1,
        thread_name="role",
        compiler_params=tiles_lib.compiler_params(),
        interpret=interpret,
    )
    query_slopes, own_keys_slopes, own_values_slopes, delta = kernel(
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
                tiles_lib.clear(own.at[own_rows()])
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
        _delta(mine, delta.at[tile, head])
        plgpu.barrier_wait(scratch["own_filled"].at[role])
        _own_slopes(
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
        acc = _own_part(mine, tile, row_blocks, key_blocks, scale, interpret)
        for name in ("own_keys_read", "own_values_read"):
            plgpu.barrier_arrive(scratch[name].at[role])
        acc = _context_part(
            acc, mine, limit, low, count, scratch, config, scale, interpret
        )
        plgpu.wait_smem_to_gmem(0)
        mine["spare"][...] = (acc * jnp.float32(scale)).astype(query.dtype)
        plgpu.commit_smem()
        tiles_lib.write_rows(mine["spare"], query_slopes, head, rows, shape)
        plgpu.wait_smem_to_gmem(0)


def _delta(mine, target):
    """Rows of dO * O, to shared memory and to memory."""
    slopes = load(mine["slopes"], layout=plgpu.Layout.WGMMA).astype(jnp.float32)
    out = load(mine["spare"], layout=plgpu.Layout.WGMMA).astype(jnp.float32)
    mine["delta"][...] = jnp.sum(slopes * out, axis=1)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(mine["delta"], target)


def _own_slopes(mine, tile, row_blocks, key_blocks, write, targets, scale, interpret):
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
    weight = jnp.exp2(
        score * jnp.float32(scale * tiles_lib.LOG2E)
        - tiles_lib.over_columns(sums, square)
    )
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


def _own_part(mine, tile, row_blocks, key_blocks, scale, interpret):
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
    weight = jnp.exp2(
        score * jnp.float32(scale * tiles_lib.LOG2E) - tiles_lib.over_rows(sums, shape)
    )
    return weight, slope - tiles_lib.over_rows(delta, shape)


def _context_part(acc, mine, limit, low, count, scratch, config, scale, interpret):
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

    whole = jnp.minimum(jax.lax.div(low, key_tile), count)
    acc = jax.lax.fori_loop(0, whole, functools.partial(step, is_masked=False), acc)
    return jax.lax.fori_loop(whole, count, functools.partial(step, is_masked=True), acc)
