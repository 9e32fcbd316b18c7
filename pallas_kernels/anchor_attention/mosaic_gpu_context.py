"""Gradients of the context's keys and values.

A worker has a few keys and one kv head, and reads all tiles of rows that see them: as
tiles ascend by context, those from a first one on. No two workers add to one gradient.
The notation is that of `mosaic_gpu_rows`, transposed: keys are rows here.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.anchor_attention import mosaic_gpu_plan
from pallas_kernels.anchor_attention import mosaic_gpu_tiles as tiles_lib
from pallas_kernels.anchor_attention.mosaic_gpu_plan import ROWS, Plan, Shape
from pallas_kernels.anchor_attention.mosaic_gpu_products import Term, products, zeros
from pallas_kernels.anchor_attention.mosaic_gpu_tiles import load
from pallas_kernels.anchor_attention.tuning import MosaicGpuConfig

WARPGROUPS = 2  # that multiply
OWN = ("keys", "values")


def shared_memory(shape: Shape, config: MosaicGpuConfig) -> int:
    """Bytes of shared memory that a worker allocates."""
    row = 2 * shape.width
    ring = config.context_stages * ROWS * (2 * row + 8)
    keys = _key_groups(config) * ROWS * 2 * row
    spare = 0 if config.shares_rows else ROWS * 2 * row
    return ring + keys + spare + tiles_lib.OVERHEAD


def gradients(
    query: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    slopes: jax.Array,
    sums: jax.Array,
    delta: jax.Array,
    plan: Plan,
    *,
    shape: Shape,
    config: MosaicGpuConfig,
    scale: float,
    interpret: Any,
) -> tuple[jax.Array, jax.Array]:
    """Gradients of keys and values.

    Args:
      query: as in `mosaic_gpu_rows.gradients`, and so on.
      keys: as there.
      values: as there.
      slopes: as there.
      sums: as there.
      delta: as there.
      plan: tables.
      shape: see there.
      config: see there.
      scale: factor of the scores.
      interpret: parameters of the interpreter.
    """
    dtype, stages, groups = query.dtype, config.context_stages, _key_groups(config)
    ring = (stages, ROWS, shape.width)
    own = (groups, ROWS, shape.width)[0 if config.shares_rows else 1 :]
    read = plgpu.Barrier(num_arrivals=groups, num_barriers=stages)
    rows_copies = tiles_lib.row_copies(shape) + 1
    filled = plgpu.Barrier(num_arrivals=rows_copies, num_barriers=stages)
    scratch = {
        "keys": tiles_lib.tiled(*own, dtype=dtype),
        "values": tiles_lib.tiled(*own, dtype=dtype),
        "query": tiles_lib.tiled(*ring, dtype=dtype),
        "slopes": tiles_lib.tiled(*ring, dtype=dtype),
        "sums": plgpu.SMEM((stages, ROWS), jnp.float32),
        "delta": plgpu.SMEM((stages, ROWS), jnp.float32),
        "keys_filled": plgpu.Barrier(num_arrivals=2, num_barriers=groups),
        "query_filled": filled,
        "slopes_filled": filled,
        "query_read": read,
        "slopes_read": read,
    }
    if not config.shares_rows:
        scratch["spare"] = plgpu.SMEM((ROWS, shape.width), jnp.float32)
        scratch["spare_filled"] = plgpu.Barrier(num_barriers=2)
        scratch["spare_read"] = plgpu.Barrier()
    key_tile = groups * ROWS
    first, full = mosaic_gpu_plan.seeing(plan, key_tile=key_tile, length=shape.length)
    keys_slopes, values_slopes = tiles_lib.launch(
        _worker,
        query,
        keys,
        values,
        slopes,
        sums,
        delta,
        plan.blocks,
        plan.limits,
        jnp.stack([first, full]),
        out_type=(
            jax.ShapeDtypeStruct(keys.shape, dtype),
            jax.ShapeDtypeStruct(keys.shape, dtype),
        ),
        scratch=scratch,
        workers=first.shape[0] * shape.kv_heads,
        warpgroups=WARPGROUPS,
        interpret=interpret,
        shape=shape,
        config=config,
        scale=scale,
    )
    return keys_slopes, values_slopes


def _key_groups(config: MosaicGpuConfig) -> int:
    return WARPGROUPS if config.shares_rows else 1


def _worker(
    query,
    keys,
    values,
    slopes,
    sums,
    delta,
    blocks,
    limits,
    seeing,
    keys_slopes,
    values_slopes,
    scratch,
    *,
    shape,
    config,
    scale,
    interpret,
):
    groups, stages = _key_groups(config), config.context_stages
    number = jax.lax.axis_index("worker")
    # The first keys, which most rows see, come first.
    head = jax.lax.rem(number, shape.kv_heads)
    rest = jax.lax.div(number, shape.kv_heads)
    sequence, place = jax.lax.rem(rest, shape.batch), jax.lax.div(rest, shape.batch)
    places = -(-shape.length // (groups * ROWS))
    first = seeing[0, sequence * places + place]
    full = seeing[1, sequence * places + place]
    count = shape.tiles - first
    line, start = sequence * shape.kv_heads + head, place * groups * ROWS
    tile_0 = sequence * shape.tiles + first
    role = jax.lax.axis_index("role")

    @pl.when(role == WARPGROUPS)
    def _():
        plgpu.set_max_registers(tiles_lib.READING, action="decrease")
        if tiles_lib.has_spare_rows(shape):
            for buffer in range(stages):
                for name in ("query", "slopes"):
                    tiles_lib.clear(scratch[name].at[buffer])
            plgpu.commit_smem()

        def read_ring(source, vector, name, beside):
            def read(step, carry):
                del carry
                buffer, tile = jax.lax.rem(step, stages), tile_0 + step
                mine = tiles_lib.blocks_of(blocks, tile, shape)

                @pl.when(step >= stages)
                def _():
                    plgpu.barrier_wait(scratch[f"{name}_read"].at[buffer])

                barrier = scratch[f"{name}_filled"].at[buffer]
                tiles_lib.read_rows(
                    source, head, mine, scratch[name].at[buffer], barrier, shape
                )
                plgpu.copy_gmem_to_smem(
                    vector.at[tile, head], scratch[beside].at[buffer], barrier
                )

            jax.lax.fori_loop(0, count, read, None)
            tiles_lib.drain(f"{name}_read", count, scratch, stages=stages)

        def read_keys():
            for group in range(groups):
                where = pl.ds(start + group * ROWS, ROWS)
                for source, name in ((keys, "keys"), (values, "values")):
                    plgpu.copy_gmem_to_smem(
                        source.at[line, where],
                        _mine(scratch[name], group, config),
                        scratch["keys_filled"].at[group],
                    )

        tiles_lib.by_warp(
            functools.partial(read_ring, query, sums, "query", "sums"),
            functools.partial(read_ring, slopes, delta, "slopes", "delta"),
            read_keys,
        )

    @pl.when(role < WARPGROUPS)
    def _():
        plgpu.set_max_registers(tiles_lib.MULTIPLYING, action="increase")
        group = role if config.shares_rows else 0
        plgpu.barrier_wait(scratch["keys_filled"].at[group])
        accs = _sum(
            role,
            group,
            start + group * ROWS,
            tile_0,
            count,
            full - first,
            limits,
            scratch,
            shape,
            config,
            scale,
            interpret,
        )
        targets = (keys_slopes, values_slopes)
        where = (line, pl.ds(start + group * ROWS, ROWS))
        if config.shares_rows:
            stores = [_mine(scratch[name], group, config) for name in OWN]
            _write(accs, [target.at[where] for target in targets], stores)
        else:
            _join(role, accs, [target.at[where] for target in targets], scratch)


def _sum(
    me,
    group,
    start,
    tile_0,
    count,
    num_masked,
    limits,
    scratch,
    shape,
    config,
    scale,
    interpret,
):
    """(dK, dV) of a warpgroup's keys over its tiles of rows."""
    stages, square = config.context_stages, (ROWS, ROWS)
    dtype = scratch["query"].dtype
    # Buffers, of which there is an even number, keep their warpgroup.
    each = 1 if config.shares_rows else WARPGROUPS
    mine = 0 if config.shares_rows else me

    def step(turn, accs, *, is_masked):
        keys_acc, values_acc = accs
        keys = _mine(scratch["keys"], group, config)
        values = _mine(scratch["values"], group, config)
        number = mine + turn * each
        buffer = jax.lax.rem(number, stages)
        rows, slopes = scratch["query"].at[buffer], scratch["slopes"].at[buffer]
        if is_masked:
            limit = load(limits.at[tile_0 + number], layout=tiles_lib.by_column())
        plgpu.barrier_wait(scratch["query_filled"].at[buffer])
        (score,) = products(
            [Term(keys, rows.transpose((1, 0)), square)], interpret=interpret
        )
        sums = load(scratch["sums"].at[buffer], layout=tiles_lib.by_column())
        weight = tiles_lib.weights(score, scale, sums, tiles_lib.over_columns)
        if is_masked:
            at = tiles_lib.positions(start, square, 0)
            weight = jnp.where(at < tiles_lib.over_columns(limit, square), weight, 0.0)
        plgpu.barrier_wait(scratch["slopes_filled"].at[buffer])
        values_acc, slope = products(
            [
                Term(weight.astype(dtype), slopes, values_acc.shape, values_acc),
                Term(values, slopes.transpose((1, 0)), square),
            ],
            interpret=interpret,
        )
        delta = load(scratch["delta"].at[buffer], layout=tiles_lib.by_column())
        plgpu.barrier_arrive(scratch["slopes_read"].at[buffer])
        slope = weight * (slope - tiles_lib.over_columns(delta, square))
        (keys_acc,) = products(
            [Term(slope.astype(dtype), rows, keys_acc.shape, keys_acc)],
            interpret=interpret,
        )
        plgpu.barrier_arrive(scratch["query_read"].at[buffer])
        return keys_acc, values_acc

    def turns(tiles):
        """How many of the first `tiles` tiles are this warpgroup's."""
        return jax.lax.div(jnp.maximum(tiles - mine, 0) + each - 1, each)

    masked = turns(jnp.clip(num_masked, 0, count))
    accs = (zeros((ROWS, shape.width)),) * 2
    accs = jax.lax.fori_loop(0, masked, functools.partial(step, is_masked=True), accs)
    keys_acc, values_acc = jax.lax.fori_loop(
        masked, turns(count), functools.partial(step, is_masked=False), accs
    )
    return keys_acc * jnp.float32(scale), values_acc


def _mine(tile: Any, group: Any, config: MosaicGpuConfig) -> Any:
    """A warpgroup's keys, or both warpgroups' same keys."""
    return tile.at[group] if config.shares_rows else tile


def _write(accs, targets, stores):
    # The keys' own memory: the last product with them has ended.
    for acc, stored, target in zip(accs, stores, targets, strict=True):
        stored[...] = acc.astype(stored.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(stored, target)
    plgpu.wait_smem_to_gmem(0)


def _join(me, accs, targets, scratch):
    """The first warpgroup adds the second's sums to its own."""

    @pl.when(me == 1)
    def _():
        for number, acc in enumerate(accs):
            if number:
                plgpu.barrier_wait(scratch["spare_read"])
            scratch["spare"][...] = acc
            plgpu.commit_smem()
            plgpu.barrier_arrive(scratch["spare_filled"].at[number])

    @pl.when(me == 0)
    def _():
        joined = []
        for number, acc in enumerate(accs):
            plgpu.barrier_wait(scratch["spare_filled"].at[number])
            other = load(scratch["spare"], layout=plgpu.Layout.WGMMA)
            joined.append(acc + other)
            if not number:
                plgpu.barrier_arrive(scratch["spare_read"])
        # The second warpgroup has done with the keys too.
        _write(joined, targets, [scratch[name] for name in OWN])
