"""What one worker of `mosaic_gpu` does: one warpgroup reads, the other multiplies.

Reading is a ring of buffers that TMA copies fill; barriers say which are filled and
which were read. Multiplying keeps the running softmax of FlashAttention,

    m' = max(m, rows of S);  P = 2^(S - m');  O' = 2^(m - m') O + P V

with P passed through shared memory (wgmma takes it from there, and so does the
interpreter). A unit that the worker read whole is written to the output; otherwise its
part is left for `mosaic_gpu_combine`.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.cached_attention.tuning import MosaicGpuConfig

ROWS = 64  # of a wgmma
PIECE = 128  # columns of an accumulator: two of them fit the registers
FLOOR = -3e38  # below all scores, and finite: exp2(-inf - FLOOR) is 0, not NaN
# Rows of the table of spans.
FIRST_ROW, NUM_ROWS, SLOT, FIRST_KEY, END_KEY, FIRST_TILE, NUM_TILES, START = range(8)


class Shape(NamedTuple):
    """What a launch is compiled for, beside its settings."""

    total_rows: int  # T
    kv_heads: int  # G
    group: int  # query heads a kv head
    width: int  # E
    key_rows: int  # positions a row of the cache, or a page, holds
    rows: int  # rows of a run, or of a tile if that is less
    copies: int  # TMA copies a tile of keys takes
    paged: bool
    pages: int  # a request can have at most


def scratch_types(shape: Shape, config: MosaicGpuConfig, dtype: Any) -> dict[str, Any]:
    """Shared memory and barriers of a worker, by name."""
    tiled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    width = shape.width
    ring = (config.stages, config.key_tile, width)
    piece = min(width, PIECE)
    filled = plgpu.Barrier(num_arrivals=shape.copies, num_barriers=config.stages)
    parts = {
        "part": plgpu.SMEM((ROWS, piece), jnp.float32),
        "sums": plgpu.SMEM((ROWS,), jnp.float32),
    }
    return {
        "rows": plgpu.SMEM((ROWS, width), dtype),
        "query": plgpu.SMEM((ROWS, width), dtype, transforms=tiled),
        "weights": plgpu.SMEM((ROWS, config.key_tile), dtype, transforms=tiled),
        "out": plgpu.SMEM((ROWS, piece), dtype),
        "keys": plgpu.SMEM(ring, dtype, transforms=tiled),
        "values": plgpu.SMEM(ring, dtype, transforms=tiled),
        "rows_filled": plgpu.Barrier(num_arrivals=shape.rows),
        "rows_read": plgpu.Barrier(),
        "keys_filled": filled,
        "values_filled": filled,
        "keys_read": plgpu.Barrier(num_barriers=config.stages),
        "values_read": plgpu.Barrier(num_barriers=config.stages),
        **({} if config.max_parts == 1 else parts),
    }


class _Unit(NamedTuple):
    run: jax.Array  # the tile of rows
    head: jax.Array  # the kv head
    first: jax.Array  # of the unit's key tiles, the first that this worker reads
    end: jax.Array
    part: jax.Array


def worker(
    query: Any,
    keys: Any,
    values: Any,
    table: Any,
    spans: Any,
    limits: Any,
    shares: Any,
    *outs_and_scratch: Any,
    shape: Shape,
    config: MosaicGpuConfig,
    workers: int,
    window: int | None,
    scale: float,
) -> None:
    """The kernel's body; the arguments are described in `mosaic_gpu.attend`."""
    *outs, scratch = outs_and_scratch
    me = jax.lax.axis_index("worker")
    num_units = shares[1, me]

    def unit_at(index: jax.Array) -> _Unit:
        is_whole = config.max_parts == 1
        unit = me + index * workers if is_whole else shares[0, me] + index
        run, head = jax.lax.div(unit, shape.kv_heads), jax.lax.rem(unit, shape.kv_heads)
        tiles = spans[NUM_TILES, run]
        if is_whole:
            zero = jnp.int32(0)
            return _Unit(run, head, zero, tiles, zero)
        share = shares[2, me]
        start = spans[START, run] + head * tiles
        first = jnp.maximum(me * share - start, 0)
        end = jnp.minimum((me + 1) * share - start, tiles)
        return _Unit(run, head, first, end, me - jax.lax.div(start, share))

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

    length = config.key_tile // shape.copies

    def places(slot, start):
        """Row of the cache and position in it of every piece of a tile of keys."""
        if not shape.paged:
            return [(slot, start)]
        found = []
        for piece in range(shape.copies):
            position = start + piece * length
            entry = jnp.minimum(jax.lax.div(position, shape.key_rows), shape.pages - 1)
            found.append((table[slot, entry], jax.lax.rem(position, shape.key_rows)))
        return found

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

        def read_tile(tile, step):
            buffer = jax.lax.rem(step, config.stages)
            # Looked up before the wait for a free buffer, which hides the latency.
            found = places(slot, (first_tile + tile) * config.key_tile)
            for source, ring, filled, was_read in (
                (keys, "keys", "keys_filled", "keys_read"),
                (values, "values", "values_filled", "values_read"),
            ):

                @pl.when(step >= config.stages)
                def _(was_read=was_read):
                    plgpu.barrier_wait(scratch[was_read].at[buffer])

                for piece, (row, at) in enumerate(found):
                    plgpu.copy_gmem_to_smem(
                        source.at[row, unit.head, pl.ds(at, length)],
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
    piece = min(width, PIECE)
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
        accs = [acc * share for acc in accs]

        def write_rows():
            first_row, num_rows = spans[FIRST_ROW, unit.run], spans[NUM_ROWS, unit.run]
            for acc, where in zip(accs, pieces, strict=True):
                plgpu.wait_smem_to_gmem(0)  # what was written before
                scratch["out"][...] = acc.astype(scratch["out"].dtype)
                plgpu.commit_smem()
                for row in range(shape.rows):

                    @pl.when(row < num_rows)
                    def _(row=row, where=where):
                        plgpu.copy_smem_to_gmem(
                            scratch["out"].at[pl.ds(row * shape.group, shape.group)],
                            outs[0].at[first_row + row, unit.head, :, where],
                        )

        def write_part():
            place = (unit.part, unit.run, unit.head)
            used = pl.ds(0, shape.rows * shape.group)
            log = jnp.where(total > 0, largest + jnp.log2(total), -jnp.inf)
            for number, (acc, where) in enumerate(zip(accs, pieces, strict=True)):
                plgpu.wait_smem_to_gmem(0)
                scratch["part"][...] = acc
                if number == 0:
                    scratch["sums"][...] = log
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(
                    scratch["part"].at[used], outs[1].at[(*place, used, where)]
                )
                if number == 0:
                    plgpu.copy_smem_to_gmem(scratch["sums"], outs[2].at[place])

        if config.max_parts == 1:
            write_rows()
        else:
            is_whole = (unit.first == 0) & (unit.end == spans[NUM_TILES, unit.run])
            pl.when(is_whole)(write_rows)
            pl.when(jnp.logical_not(is_whole))(write_part)
        return step

    jax.lax.fori_loop(0, num_units, compute_unit, jnp.int32(0))
    plgpu.wait_smem_to_gmem(0)
