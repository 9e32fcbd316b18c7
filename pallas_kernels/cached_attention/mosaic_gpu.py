"""The kernel for NVIDIA GPUs from Hopper on, in Pallas's Mosaic GPU dialect.

One warpgroup issues TMA copies of key and value tiles into a ring of buffers, another
multiplies (wgmma) and keeps the running softmax. Query rows come as they lie in memory,
one copy a row, and leave the same way: no kernel before or after pads or transposes.
A launch has one worker a multiprocessor; `schedule` says who reads what.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _compat, _dispatch
from pallas_kernels.cached_attention import mosaic_gpu_combine, tuning
from pallas_kernels.cached_attention import runs as runs_lib
from pallas_kernels.cached_attention import schedule as schedule_lib
from pallas_kernels.cached_attention.tuning import MosaicGpuConfig

ROWS = 64  # of a wgmma
FLOOR = -3e38  # below all scores, and finite: exp2(-inf - FLOOR) is 0, not NaN
SHARED_MEMORY = 232_448  # bytes a block may have on Hopper


class _Shape(NamedTuple):
    total_rows: int  # T
    kv_heads: int  # G
    group: int  # query heads a kv head
    width: int  # E
    key_rows: int  # positions a row of the cache, or a page, holds
    rows: int  # rows of a run, or of a tile if that is less
    copies: int  # TMA copies a tile of keys takes
    paged: bool
    pages: int  # a request can have at most


def supports(
    query: Any, keys: Any, *, paged: bool, config: MosaicGpuConfig | None = None
) -> str | None:
    """Why the kernel can't run these arrays, or None if it can.

    Args:
      query: [T, H, E]; keys: [B, G, C, E] or pages; only shapes and dtypes are read.
    """
    if (missing := _compat.mosaic_gpu_missing()) is not None:
        return missing
    _, heads, width = query.shape
    kv_heads, key_rows = keys.shape[1], keys.shape[2]
    if query.dtype not in (jnp.bfloat16, jnp.float16) or keys.dtype != query.dtype:
        return (
            "wgmma multiplies bfloat16 or float16 keys and queries of one dtype, got "
            f"{query.dtype} and {keys.dtype}"
        )
    if width not in (64, 128, 256):
        return f"head width must be 64, 128 or 256, got {width}"
    if heads // kv_heads > ROWS:
        return (
            f"at most {ROWS} query heads a kv head fit a tile, got {heads // kv_heads}"
        )
    if key_rows % 8:
        what = "the page size" if paged else "the capacity of the cache"
        return f"{what} must be a multiple of 8, got {key_rows}"
    tile = 64 if config is None else config.key_tile
    if paged and tile % key_rows and key_rows % tile:
        return f"pages of {key_rows} keys and tiles of {tile} must divide one another"
    if config is not None:
        needed = shared_memory(config, width)
        if needed > SHARED_MEMORY:
            return (
                f"{config} needs {needed} bytes of shared memory, the limit is "
                f"{SHARED_MEMORY}"
            )
    return None


def default_config(
    query: Any, keys: Any, runs: runs_lib.Runs, page_table: Any
) -> MosaicGpuConfig:
    """What the table says for these shapes on this device."""
    group = query.shape[1] // keys.shape[1]
    count, length = runs.num_keys.shape
    units = count * -(-length // (ROWS // group)) * keys.shape[1]
    capacity = keys.shape[2] * (1 if page_table is None else page_table.shape[1])
    found = tuning.mosaic_gpu(
        units,
        capacity,
        query.shape[2],
        multiprocessors=_dispatch.multiprocessors(default=132),
    )
    if page_table is not None and found.key_tile % keys.shape[2]:
        return dataclasses.replace(found, key_tile=64)
    return found


def shared_memory(config: MosaicGpuConfig, width: int) -> int:
    """Bytes of shared memory that a worker allocates, barriers aside."""
    ring = config.stages * 2 * config.key_tile * width * 2
    out = ROWS * width * (2 if config.max_parts == 1 else 4)
    fixed = 2 * ROWS * width * 2 + ROWS * config.key_tile * 2 + out + ROWS * 4
    return ring + fixed + 4096  # barriers and the scratch of reductions


def attend(
    query: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    runs: runs_lib.Runs,
    *,
    page_table: jax.Array | None,
    window: int | None,
    scale: float,
    config: MosaicGpuConfig,
    interpret: Any = None,
) -> jax.Array:
    """Attention output [T, H, E]; rows outside all runs hold anything."""
    total, heads, width = query.shape
    kv_heads, key_rows = keys.shape[1], keys.shape[2]
    group = heads // kv_heads
    shape = _Shape(
        total_rows=total,
        kv_heads=kv_heads,
        group=group,
        width=width,
        key_rows=key_rows,
        rows=min(runs.num_keys.shape[1], ROWS // group),
        copies=max(config.key_tile // key_rows, 1) if page_table is not None else 1,
        paged=page_table is not None,
        pages=1 if page_table is None else page_table.shape[1],
    )
    spans = runs_lib.spans(
        runs,
        rows=ROWS,
        rows_per_token=group,
        key_tile=config.key_tile,
        window=window,
    )
    count = spans.num_tiles.shape[0]
    units = count * kv_heads
    if config.max_parts == 1:
        workers = min(config.workers, units)
        plan = schedule_lib.whole_units(spans.num_tiles, kv_heads, workers)
        out_type: Any = jax.ShapeDtypeStruct(
            (total, kv_heads, group, width), query.dtype
        )
    else:
        workers = config.workers
        plan = schedule_lib.equal_shares(
            spans.num_tiles, kv_heads, workers, config.max_parts
        )
        parts = config.max_parts
        out_type = (
            jax.ShapeDtypeStruct((parts, count, kv_heads, ROWS, width), jnp.float32),
            jax.ShapeDtypeStruct((parts, count, kv_heads, ROWS), jnp.float32),
        )
    kernel = plgpu.kernel(
        functools.partial(
            _worker,
            shape=shape,
            config=config,
            workers=workers,
            window=window,
            scale=scale,
        ),
        out_type=out_type,
        scratch_types=(_scratch(shape, config, query.dtype),),
        grid=(workers,),
        grid_names=("worker",),
        num_threads=2,
        thread_name="role",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )
    table = jnp.zeros((1, 1), jnp.int32)
    if page_table is not None:  # entries beyond a slot's keys may be anything
        table = jnp.clip(page_table, 0, keys.shape[0] - 1)
    spans_table = jnp.stack(
        [
            spans.first_row,
            spans.num_rows,
            spans.slot,
            spans.first_key,
            spans.end_key,
            spans.first_tile,
            spans.num_tiles,
            plan.unit_start,
        ]
    )
    shares = jnp.stack(
        [plan.first_unit, plan.num_units, jnp.broadcast_to(plan.share, (workers,))]
    )
    out = kernel(
        query.reshape(total, kv_heads, group, width),
        keys,
        values,
        table,
        spans_table,
        spans.limits,
        shares,
    )
    if config.max_parts > 1:
        tiles = jnp.concatenate(
            [spans.first_row[None], spans.num_rows[None], plan.num_parts.T]
        )
        outs, sums = out
        out = mosaic_gpu_combine.combine(
            outs,
            sums,
            tiles,
            total=total,
            group=group,
            rows=shape.rows,
            dtype=query.dtype,
            interpret=interpret,
        )
    return out.reshape(total, heads, width)


def _scratch(shape: _Shape, config: MosaicGpuConfig, dtype: Any) -> dict[str, Any]:
    tiled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    width = shape.width
    ring = (config.stages, config.key_tile, width)
    out_dtype = dtype if config.max_parts == 1 else jnp.float32
    filled = plgpu.Barrier(num_arrivals=shape.copies, num_barriers=config.stages)
    return {
        "rows": plgpu.SMEM((ROWS, width), dtype),
        "query": plgpu.SMEM((ROWS, width), dtype, transforms=tiled),
        "weights": plgpu.SMEM((ROWS, config.key_tile), dtype, transforms=tiled),
        "out": plgpu.SMEM((ROWS, width), out_dtype),
        "sums": plgpu.SMEM((ROWS,), jnp.float32),
        "keys": plgpu.SMEM(ring, dtype, transforms=tiled),
        "values": plgpu.SMEM(ring, dtype, transforms=tiled),
        "rows_filled": plgpu.Barrier(num_arrivals=shape.rows),
        "rows_read": plgpu.Barrier(),
        "keys_filled": filled,
        "values_filled": filled,
        "keys_read": plgpu.Barrier(num_barriers=config.stages),
        "values_read": plgpu.Barrier(num_barriers=config.stages),
    }


class _Unit(NamedTuple):
    run: jax.Array  # the tile of rows
    head: jax.Array  # the kv head
    first: jax.Array  # of the unit's key tiles, the first that this worker reads
    end: jax.Array
    part: jax.Array


# Rows of the table of spans.
FIRST_ROW, NUM_ROWS, SLOT, FIRST_KEY, END_KEY, FIRST_TILE, NUM_TILES, START = range(8)


def _worker(
    query: Any,
    keys: Any,
    values: Any,
    table: Any,
    spans: Any,
    limits: Any,
    shares: Any,
    *outs_and_scratch: Any,
    shape: _Shape,
    config: MosaicGpuConfig,
    workers: int,
    window: int | None,
    scale: float,
) -> None:
    *outs, scratch = outs_and_scratch
    worker = jax.lax.axis_index("worker")
    num_units = shares[1, worker]

    def unit_at(index: jax.Array) -> _Unit:
        if config.max_parts == 1:
            unit = worker + index * workers
        else:
            unit = shares[0, worker] + index
        run, head = jax.lax.div(unit, shape.kv_heads), jax.lax.rem(unit, shape.kv_heads)
        tiles = spans[NUM_TILES, run]
        if config.max_parts == 1:
            zero = jnp.int32(0)
            return _Unit(run, head, zero, tiles, zero)
        share = shares[2, worker]
        start = spans[START, run] + head * tiles
        first = jnp.maximum(worker * share - start, 0)
        end = jnp.minimum((worker + 1) * share - start, tiles)
        return _Unit(run, head, first, end, worker - jax.lax.div(start, share))

    role = jax.lax.axis_index("role")

    @pl.when(role == 1)
    def _() -> None:
        plgpu.set_max_registers(40, action="decrease")
        _read(
            query,
            keys,
            values,
            table,
            spans,
            unit_at,
            num_units,
            scratch,
            shape,
            config,
        )

    @pl.when(role == 0)
    def _() -> None:
        plgpu.set_max_registers(232, action="increase")
        _compute(
            spans,
            limits,
            outs,
            unit_at,
            num_units,
            scratch,
            shape,
            config,
            window,
            scale,
        )


def _read(
    query, keys, values, table, spans, unit_at, num_units, scratch, shape, config
):
    """Issues all copies into shared memory, in the order in which they are used."""

    def tile_source(ref, slot, head, start, piece, length):
        if not shape.paged:
            return ref.at[slot, head, pl.ds(start, length)]
        position = start + piece * length
        entry = jnp.minimum(jax.lax.div(position, shape.key_rows), shape.pages - 1)
        page = table[slot, entry]
        return ref.at[page, head, pl.ds(jax.lax.rem(position, shape.key_rows), length)]

    def read_unit(index, step):
        unit = unit_at(index)

        @pl.when(index > 0)
        def _():
            plgpu.barrier_wait(scratch["rows_read"])

        first_row = spans[FIRST_ROW, unit.run]
        for row in range(shape.rows):
            plgpu.copy_gmem_to_smem(
                query.at[jnp.minimum(first_row + row, shape.total_rows - 1), unit.head],
                scratch["rows"].at[pl.ds(row * shape.group, shape.group)],
                scratch["rows_filled"],
            )
        slot = spans[SLOT, unit.run]
        first_tile = spans[FIRST_TILE, unit.run]
        length = config.key_tile // shape.copies

        def read_tile(tile, step):
            buffer = jax.lax.rem(step, config.stages)
            start = (first_tile + tile) * config.key_tile
            for source, ring, filled, was_read in (
                (keys, "keys", "keys_filled", "keys_read"),
                (values, "values", "values_filled", "values_read"),
            ):

                @pl.when(step >= config.stages)
                def _(was_read=was_read):
                    plgpu.barrier_wait(scratch[was_read].at[buffer])

                for piece in range(shape.copies):
                    plgpu.copy_gmem_to_smem(
                        tile_source(source, slot, unit.head, start, piece, length),
                        scratch[ring].at[buffer, pl.ds(piece * length, length)],
                        scratch[filled].at[buffer],
                    )
            return step + 1

        return jax.lax.fori_loop(unit.first, unit.end, read_tile, step)

    steps = jax.lax.fori_loop(0, num_units, read_unit, jnp.int32(0))
    # Every phase of a barrier is awaited before the worker ends.
    for buffer in range(config.stages):

        @pl.when(buffer < steps)
        def _(buffer=buffer):
            plgpu.barrier_wait(scratch["keys_read"].at[buffer])
            plgpu.barrier_wait(scratch["values_read"].at[buffer])

    @pl.when(num_units > 0)
    def _():
        plgpu.barrier_wait(scratch["rows_read"])


def _compute(
    spans,
    limits,
    outs,
    unit_at,
    num_units,
    scratch,
    shape,
    config,
    window,
    scale,
):
    """Multiplies what `_read` brings, keeps the softmax and writes a unit's output."""
    width, key_tile = shape.width, config.key_tile
    load = functools.partial(plgpu.load, optimized=False)
    tiled = plgpu.Layout.WGMMA
    piece = min(width, 128)  # columns of an accumulator: two of them fit the registers
    pieces = [pl.ds(at, piece) for at in range(0, width, piece)]
    row_layout = plgpu.Layout.WGMMA.reduce(1)
    to_log2 = jnp.float32(scale * math.log2(math.e))

    def columns(vector, length):
        return jax.lax.broadcast_in_dim(vector, (ROWS, length), [0])

    def compute_unit(index, step):
        unit = unit_at(index)
        first_tile = spans[FIRST_TILE, unit.run]
        first_key, end_key = spans[FIRST_KEY, unit.run], spans[END_KEY, unit.run]
        seen = load(limits.at[unit.run], layout=row_layout)
        plgpu.barrier_wait(scratch["rows_filled"])
        for where in pieces:
            scratch["query"][:, where] = load(
                scratch["rows"].at[:, where], layout=tiled
            )
        plgpu.barrier_arrive(scratch["rows_read"])
        plgpu.commit_smem()

        def compute_tile(tile, carry):
            step, accs, largest, total = carry
            buffer = jax.lax.rem(step, config.stages)
            start = (first_tile + tile) * key_tile
            plgpu.barrier_wait(scratch["keys_filled"].at[buffer])

            def scores(acc_ref):
                tile_keys = scratch["keys"].at[buffer].transpose((1, 0))
                plgpu.wgmma(acc_ref, scratch["query"], tile_keys)
                return acc_ref[...]

            score = pl.run_scoped(scores, plgpu.ACC((ROWS, key_tile), jnp.float32))
            plgpu.barrier_arrive(scratch["keys_read"].at[buffer])
            position = start + plgpu.broadcasted_iota(
                jnp.int32, (ROWS, key_tile), 1, layout=tiled
            )
            limit = columns(seen, key_tile)
            visible = position < limit
            if window is not None:
                visible = visible & (position >= limit - window)
            score = jnp.where(visible, score * to_log2, -jnp.inf)
            new = jnp.maximum(largest, jnp.max(score, axis=1))
            decay = jnp.exp2(largest - new)
            weight = jnp.exp2(score - columns(new, key_tile))
            total = total * decay + jnp.sum(weight, axis=1)
            scratch["weights"][...] = weight.astype(scratch["weights"].dtype)
            plgpu.barrier_wait(scratch["values_filled"].at[buffer])

            # What no row sees may be anything, and 0 * NaN is NaN.
            @pl.when((start < first_key) | (start + key_tile > end_key))
            def _():
                at = start + plgpu.broadcasted_iota(
                    jnp.int32, (key_tile, piece), 0, layout=tiled
                )
                read = (at >= first_key) & (at < end_key)
                for where in pieces:
                    stored = scratch["values"].at[buffer, :, where]
                    value = load(stored, layout=tiled)
                    stored[...] = jnp.where(read, value, jnp.zeros_like(value))

            plgpu.commit_smem()

            def add(acc, where):
                def weighted(acc_ref):
                    value = scratch["values"].at[buffer, :, where]
                    plgpu.wgmma(acc_ref, scratch["weights"], value)
                    return acc_ref[...]

                part = pl.run_scoped(weighted, plgpu.ACC((ROWS, piece), jnp.float32))
                return acc * columns(decay, piece) + part

            accs = tuple(add(*pair) for pair in zip(accs, pieces, strict=True))
            plgpu.barrier_arrive(scratch["values_read"].at[buffer])
            return step + 1, accs, new, total

        def rows_of(value):
            return plgpu.layout_cast(jnp.full((ROWS,), value, jnp.float32), row_layout)

        zeros = plgpu.layout_cast(jnp.zeros((ROWS, piece), jnp.float32), tiled)
        start = (step, (zeros,) * len(pieces), rows_of(FLOOR), rows_of(0.0))
        step, accs, largest, total = jax.lax.fori_loop(
            unit.first, unit.end, compute_tile, start
        )
        share = columns(1 / jnp.where(total > 0, total, 1.0), piece)
        plgpu.wait_smem_to_gmem(0)  # the unit before
        for acc, where in zip(accs, pieces, strict=True):
            scratch["out"][:, where] = (acc * share).astype(scratch["out"].dtype)
        if config.max_parts > 1:
            scratch["sums"][...] = jnp.where(
                total > 0, largest + jnp.log2(total), -jnp.inf
            )
        plgpu.commit_smem()
        if config.max_parts > 1:
            place = (unit.part, unit.run, unit.head)
            used = pl.ds(0, shape.rows * shape.group)
            plgpu.copy_smem_to_gmem(scratch["out"].at[used], outs[0].at[(*place, used)])
            plgpu.copy_smem_to_gmem(scratch["sums"], outs[1].at[place])
            return step
        first_row, num_rows = spans[FIRST_ROW, unit.run], spans[NUM_ROWS, unit.run]
        for row in range(shape.rows):

            @pl.when(row < num_rows)
            def _(row=row):
                plgpu.copy_smem_to_gmem(
                    scratch["out"].at[pl.ds(row * shape.group, shape.group)],
                    outs[0].at[first_row + row, unit.head],
                )

        return step

    jax.lax.fori_loop(0, num_units, compute_unit, jnp.int32(0))
    plgpu.wait_smem_to_gmem(0)
