"""What one worker of `mosaic_gpu` does: one warpgroup reads, the others multiply.

Reading is a ring of buffers that TMA copies fill; barriers say which are filled and
which were read. Head widths beyond 128 are cut into pieces of 128 columns, each a tile
of its own in shared memory.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.cached_attention import mosaic_gpu_softmax
from pallas_kernels.cached_attention.mosaic_gpu_softmax import Shape, Unit
from pallas_kernels.cached_attention.tuning import MosaicGpuConfig

ROWS = mosaic_gpu_softmax.ROWS
# Rows of the table of spans; the combine's follow.
FIRST_ROW, NUM_ROWS, SLOT, FIRST_KEY, END_KEY, FIRST_TILE, NUM_TILES, START = range(8)
NUM_FIELDS = 8


def scratch_types(shape: Shape, config: MosaicGpuConfig, dtype: Any) -> dict[str, Any]:
    """Shared memory and barriers of a worker, by name."""
    tiled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    pieces, piece = shape.pieces, shape.piece
    ring = (config.stages, pieces, config.key_tile, piece)
    weights = (config.warpgroups, ROWS, config.key_tile)
    filled = plgpu.Barrier(
        num_arrivals=shape.copies * pieces, num_barriers=config.stages
    )
    read = plgpu.Barrier(num_barriers=config.stages)
    found = {
        "rows": plgpu.SMEM((pieces, ROWS, piece), dtype),
        "query": plgpu.SMEM((pieces, ROWS, piece), dtype, transforms=tiled),
        "weights": plgpu.SMEM(weights, dtype, transforms=tiled),
        "out": plgpu.SMEM((ROWS, piece), dtype),
        "keys": plgpu.SMEM(ring, dtype, transforms=tiled),
        "values": plgpu.SMEM(ring, dtype, transforms=tiled),
        "rows_filled": plgpu.Barrier(num_arrivals=shape.rows * pieces),
        "rows_read": plgpu.Barrier(),
        "keys_filled": filled,
        "values_filled": filled,
        "keys_read": read,
        "values_read": read,
    }
    if config.max_parts > 1 or config.warpgroups > 1:
        found["spare"] = plgpu.SMEM((ROWS, piece), jnp.float32)
        found["sums"] = plgpu.SMEM((2, ROWS), jnp.float32)  # and maxima
    if config.warpgroups > 1:
        found |= {
            name: plgpu.Barrier()
            for name in ("query_filled", "spare_filled", "spare_read")
        }
    return found


def shared_memory(width: int, config: MosaicGpuConfig) -> int:
    """Bytes of shared memory that a worker allocates."""
    piece = min(width, mosaic_gpu_softmax.PIECE)
    ring = config.stages * 2 * config.key_tile * width * 2
    weights = config.warpgroups * ROWS * config.key_tile * 2
    needs_spare = config.max_parts > 1 or config.warpgroups > 1
    spare = ROWS * piece * 4 + 2 * ROWS * 4 if needs_spare else 0
    fixed = 2 * ROWS * width * 2 + ROWS * piece * 2
    return ring + weights + spare + fixed + REDUCTIONS + 1024  # barriers, alignment


REDUCTIONS = 512  # bytes for reductions, none of which crosses warps


def worker(
    query: Any,
    keys: Any,
    values: Any,
    table: Any,
    spans: Any,
    limits: Any,
    shares: Any,
    *more: Any,
    shape: Shape,
    config: MosaicGpuConfig,
    workers: int,
    window: int | None,
    scale: float,
) -> None:
    """The kernel's body; the arguments are described in `mosaic_gpu.attend`."""
    *more, scratch = more
    is_row, *outs = more if shape.has_padding else (None, *more)
    me = jax.lax.axis_index("worker")
    # All at once: a load takes as long as a tile of keys.
    first_unit, num_units, share = (shares[field, me] for field in range(3))
    only = None
    if spans.shape[1] == 1:
        only = [spans[field, 0] for field in range(NUM_FIELDS)]

    def unit_at(index: jax.Array) -> Unit:
        is_whole = config.max_parts == 1
        number = me + index * workers if is_whole else first_unit + index
        run = jax.lax.div(number, shape.kv_heads) if only is None else jnp.int32(0)
        head = jax.lax.rem(number, shape.kv_heads)
        row = only
        if row is None:
            row = [spans[field, run] for field in range(NUM_FIELDS)]
        tiles = row[NUM_TILES]
        first, end, part = jnp.int32(0), tiles, jnp.int32(0)
        if not is_whole:
            start = row[START] + head * tiles
            first = jnp.maximum(me * share - start, 0)
            end = jnp.minimum((me + 1) * share - start, tiles)
            part = me - jax.lax.div(start, share)
        return Unit(
            run=run,
            head=head,
            first=first,
            end=end,
            part=part,
            is_whole=(first == 0) & (end == tiles),
            first_row=row[FIRST_ROW],
            num_rows=row[NUM_ROWS],
            slot=row[SLOT],
            first_key=row[FIRST_KEY],
            end_key=row[END_KEY],
            first_tile=row[FIRST_TILE],
        )

    role = jax.lax.axis_index("role")

    @pl.when(role == config.warpgroups)
    def _() -> None:
        plgpu.set_max_registers(40, action="decrease")
        _read(query, keys, values, table, unit_at, num_units, scratch, shape, config)

    @pl.when(role < config.warpgroups)
    def _() -> None:
        plgpu.set_max_registers(232, action="increase")
        if is_row is not None:

            @pl.when(role == 0)
            def _() -> None:
                _clear_padding(is_row, outs[0], scratch, shape, workers)

        mosaic_gpu_softmax.multiply(
            role,
            limits,
            outs,
            unit_at,
            num_units,
            scratch,
            shape=shape,
            config=config,
            window=window,
            scale=scale,
        )


def _clear_padding(is_row, out, scratch, shape, workers):
    """Zeros to rows of the output that are of no run; workers take them in turn."""
    me = jax.lax.axis_index("worker")
    turns = jax.lax.div(shape.total_rows - me + workers - 1, workers)

    @pl.when(turns > 0)
    def _():
        zeros = jnp.zeros(scratch["out"].shape, scratch["out"].dtype)
        scratch["out"][...] = plgpu.layout_cast(zeros, plgpu.Layout.WGMMA)
        plgpu.commit_smem()

    def clear(turn, carry):
        row = me + turn * workers

        @pl.when(is_row[row] == 0)
        def _():
            for head in range(shape.kv_heads):
                for piece in range(shape.pieces):
                    where = pl.ds(piece * shape.piece, shape.piece)
                    plgpu.copy_smem_to_gmem(
                        scratch["out"].at[pl.ds(0, shape.group)],
                        out.at[row, head, :, where],
                    )

        return carry

    jax.lax.fori_loop(0, turns, clear, jnp.int32(0))


def _read(query, keys, values, table, unit_at, num_units, scratch, shape, config):
    """Issues all copies into shared memory, in the order in which they are used."""
    length = config.key_tile // shape.copies
    columns = [pl.ds(at * shape.piece, shape.piece) for at in range(shape.pieces)]

    def places(slot, start):
        """Row of the cache and position in it of every copy of a tile of keys."""
        if not shape.paged:
            return [(slot, start)]
        found = []
        for number in range(shape.copies):
            position = start + number * length
            entry = jnp.minimum(jax.lax.div(position, shape.key_rows), shape.pages - 1)
            found.append((table[slot, entry], jax.lax.rem(position, shape.key_rows)))
        return found

    def read_unit(index, step):
        unit = unit_at(index)

        @pl.when(index > 0)
        def _():
            plgpu.barrier_wait(scratch["rows_read"])

        for row in range(shape.rows):
            at = jnp.minimum(unit.first_row + row, shape.total_rows - 1)
            for piece, where in enumerate(columns):
                plgpu.copy_gmem_to_smem(
                    query.at[at, unit.head, :, where],
                    scratch["rows"].at[piece, pl.ds(row * shape.group, shape.group)],
                    scratch["rows_filled"],
                )

        def read_tile(tile, step):
            buffer = jax.lax.rem(step, config.stages)
            # Looked up before the wait for a free buffer, which hides the latency.
            found = places(unit.slot, (unit.first_tile + tile) * config.key_tile)
            for source, ring in ((keys, "keys"), (values, "values")):

                @pl.when(step >= config.stages)
                def _(ring=ring):
                    plgpu.barrier_wait(scratch[f"{ring}_read"].at[buffer])

                for number, (row, at) in enumerate(found):
                    for piece, where in enumerate(columns):
                        into = (buffer, piece, pl.ds(number * length, length))
                        plgpu.copy_gmem_to_smem(
                            source.at[row, unit.head, pl.ds(at, length), where],
                            scratch[ring].at[into],
                            scratch[f"{ring}_filled"].at[buffer],
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
