"""The multiplying half of a worker of `mosaic_gpu`.

A warpgroup keeps the running softmax of FlashAttention over its tiles of keys,

    m' = max(m, rows of S);  P = 2^(S - m');  O' = 2^(m - m') O + P V

with P passed through shared memory (wgmma takes it from there, and so does the
interpreter). Two warpgroups take a unit's tiles in turn, so that one multiplies while
the other does its softmax; the first joins both. A unit that the worker read whole is
written to the output; otherwise its part is left for `mosaic_gpu_combine`.
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
# Below all scores, and finite: -inf - FLOOR is -inf, whose exp2 is 0, and not NaN.
FLOOR = -3e38


class Shape(NamedTuple):
    """What a launch is compiled for, beside its settings."""

    total_rows: int  # T
    kv_heads: int  # G
    group: int  # query heads a kv head
    pieces: int  # of the head width
    piece: int  # columns of one
    key_rows: int  # positions a row of the cache, or a page, holds
    rows: int  # rows of a run, or of a tile if that is less
    copies: int  # TMA copies a tile of keys takes
    paged: bool
    pages: int  # a request can have at most
    has_padding: bool  # rows of the query may be of no run


class Unit(NamedTuple):
    """A tile of rows and a kv head, and what of its keys this worker reads."""

    run: jax.Array  # the tile of rows
    head: jax.Array
    first: jax.Array  # of the unit's tiles of keys
    end: jax.Array
    part: jax.Array
    is_whole: jax.Array
    first_row: jax.Array
    num_rows: jax.Array
    slot: jax.Array
    first_key: jax.Array
    end_key: jax.Array
    first_tile: jax.Array


def multiply(
    me: Any,
    limits: Any,
    outs: list[Any],
    unit_at: Any,
    num_units: Any,
    scratch: dict[str, Any],
    *,
    shape: Shape,
    config: MosaicGpuConfig,
    window: int | None,
    scale: float,
) -> None:
    """Multiplies what was read, keeps the softmax and writes every unit's output.

    Args:
      me: the warpgroup's number.
      limits: int32 [N', 64] in memory, keys that each row sees.
      outs: the output, and with parts also theirs and their denominators.
      unit_at: the worker's unit of a number.
      num_units: of the worker.
      scratch: shared memory and barriers.
      shape: see there.
      config: see there.
      window: a row sees its last `window` keys only.
      scale: factor of the scores.
    """
    load = functools.partial(plgpu.load, optimized=False)
    tiled, by_row = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(1)
    takes_turns = config.warpgroups > 1

    def constant(value):
        return plgpu.layout_cast(jnp.full((ROWS,), value, jnp.float32), by_row)

    def fetch_query():
        plgpu.barrier_wait(scratch["rows_filled"])
        for piece in range(shape.pieces):
            rows = load(scratch["rows"].at[piece], layout=tiled)
            scratch["query"].at[piece][...] = rows
        plgpu.barrier_arrive(scratch["rows_read"])
        plgpu.commit_smem()
        if takes_turns:
            plgpu.barrier_arrive(scratch["query_filled"])

    def do_unit(index, step):
        unit = unit_at(index)
        seen = load(limits.at[unit.run], layout=by_row)
        count = unit.end - unit.first
        mine = step
        if takes_turns:
            pl.when(me == 0)(fetch_query)

            @pl.when(me == 1)
            def _():
                plgpu.barrier_wait(scratch["query_filled"])

            # Buffers, of which there is an even number, keep their warpgroup.
            mine = step + jax.lax.rem(step + me, 2)
            count = jax.lax.div(step + count - mine + 1, 2)
        else:
            fetch_query()

        def do_tile(turn, carry):
            at = mine + turn * config.warpgroups
            start = (unit.first_tile + unit.first + at - step) * config.key_tile
            buffer = jax.lax.rem(at, config.stages)
            return _tile(
                carry,
                me,
                seen,
                unit,
                start,
                buffer,
                scratch,
                shape=shape,
                config=config,
                window=window,
                to_log2=scale * math.log2(math.e),
            )

        zeros = plgpu.layout_cast(jnp.zeros((ROWS, shape.piece), jnp.float32), tiled)
        carry = ((zeros,) * shape.pieces, constant(FLOOR), constant(0.0))
        accs, largest, total = jax.lax.fori_loop(0, count, do_tile, carry)
        if not takes_turns:
            _write(accs, largest, total, unit, outs, scratch, shape, config)
            return step + unit.end - unit.first

        @pl.when(me == 1)
        def _():
            @pl.when(index > 0)
            def _():
                plgpu.barrier_wait(scratch["spare_read"])

            scratch["spare"][...] = accs[0]
            scratch["sums"].at[1][...] = largest
            scratch["sums"].at[0][...] = total
            plgpu.commit_smem()
            plgpu.barrier_arrive(scratch["spare_filled"])

        @pl.when(me == 0)
        def _():
            plgpu.barrier_wait(scratch["spare_filled"])
            other = load(scratch["spare"], layout=tiled)
            other_largest = load(scratch["sums"].at[1], layout=by_row)
            other_total = load(scratch["sums"].at[0], layout=by_row)
            both = jnp.maximum(largest, other_largest)
            ours, theirs = jnp.exp2(largest - both), jnp.exp2(other_largest - both)
            acc = accs[0] * _columns(ours, shape) + other * _columns(theirs, shape)
            joined = total * ours + other_total * theirs
            _write((acc,), both, joined, unit, outs, scratch, shape, config)
            if config.max_parts > 1:  # the part leaves from the same memory
                plgpu.wait_smem_to_gmem(0)
            plgpu.barrier_arrive(scratch["spare_read"])

        return step + unit.end - unit.first

    jax.lax.fori_loop(0, num_units, do_unit, jnp.int32(0))
    plgpu.wait_smem_to_gmem(0)
    if takes_turns:  # every phase of a barrier is awaited

        @pl.when((me == 1) & (num_units > 0))
        def _():
            plgpu.barrier_wait(scratch["spare_read"])


def _columns(vector: jax.Array, shape: Shape) -> jax.Array:
    return jax.lax.broadcast_in_dim(vector, (ROWS, shape.piece), [0])


def _tile(
    carry,
    me,
    seen,
    unit,
    start,
    buffer,
    scratch,
    *,
    shape,
    config,
    window,
    to_log2,
):
    """One step of the softmax over the tile of keys from `start` on."""
    accs, largest, total = carry
    key_tile, tiled = config.key_tile, plgpu.Layout.WGMMA
    plgpu.barrier_wait(scratch["keys_filled"].at[buffer])

    def multiply_keys(acc_ref):
        for piece in range(shape.pieces):
            keys = scratch["keys"].at[buffer, piece].transpose((1, 0))
            plgpu.wgmma(acc_ref, scratch["query"].at[piece], keys)
        return acc_ref[...]

    score = pl.run_scoped(multiply_keys, plgpu.ACC((ROWS, key_tile), jnp.float32))
    plgpu.barrier_arrive(scratch["keys_read"].at[buffer])
    position = start + plgpu.broadcasted_iota(
        jnp.int32, (ROWS, key_tile), 1, layout=tiled
    )
    limit = jax.lax.broadcast_in_dim(seen, (ROWS, key_tile), [0])
    visible = position < limit
    if window is not None:
        visible = visible & (position >= limit - window)
    score = jnp.where(visible, score * jnp.float32(to_log2), -jnp.inf)
    new = jnp.maximum(largest, jnp.max(score, axis=1))
    decay = jnp.exp2(largest - new)
    weight = jnp.exp2(score - jax.lax.broadcast_in_dim(new, score.shape, [0]))
    total = total * decay + jnp.sum(weight, axis=1)
    weights = scratch["weights"].at[me]
    weights[...] = weight.astype(weights.dtype)
    plgpu.barrier_wait(scratch["values_filled"].at[buffer])

    # What no row sees may be anything, and 0 * NaN is NaN.
    @pl.when((start < unit.first_key) | (start + key_tile > unit.end_key))
    def _():
        at = start + plgpu.broadcasted_iota(
            jnp.int32, (key_tile, shape.piece), 0, layout=tiled
        )
        read = (at >= unit.first_key) & (at < unit.end_key)
        for piece in range(shape.pieces):
            stored = scratch["values"].at[buffer, piece]
            value = plgpu.load(stored, layout=tiled, optimized=False)
            stored[...] = jnp.where(read, value, jnp.zeros_like(value))

    plgpu.commit_smem()

    def add(acc, piece):
        def multiply_values(acc_ref):
            plgpu.wgmma(acc_ref, weights, scratch["values"].at[buffer, piece])
            return acc_ref[...]

        part = pl.run_scoped(multiply_values, plgpu.ACC(acc.shape, jnp.float32))
        return acc * _columns(decay, shape) + part

    accs = tuple(add(acc, piece) for piece, acc in enumerate(accs))
    plgpu.barrier_arrive(scratch["values_read"].at[buffer])
    return accs, new, total


def _write(accs, largest, total, unit, outs, scratch, shape, config):
    """A whole unit's rows to the output, or a part with its denominators."""
    share = _columns(1 / jnp.where(total > 0, total, 1.0), shape)
    accs = [acc * share for acc in accs]
    columns = [pl.ds(at * shape.piece, shape.piece) for at in range(shape.pieces)]

    def write_rows():
        for acc, where in zip(accs, columns, strict=True):
            plgpu.wait_smem_to_gmem(0)  # what was written before
            scratch["out"][...] = acc.astype(scratch["out"].dtype)
            plgpu.commit_smem()
            for row in range(shape.rows):

                @pl.when(row < unit.num_rows)
                def _(row=row, where=where):
                    plgpu.copy_smem_to_gmem(
                        scratch["out"].at[pl.ds(row * shape.group, shape.group)],
                        outs[0].at[unit.first_row + row, unit.head, :, where],
                    )

    def write_part():
        place = (unit.part, unit.run, unit.head)
        used = pl.ds(0, shape.rows * shape.group)
        plgpu.wait_smem_to_gmem(0)
        scratch["sums"].at[0][...] = jnp.where(
            total > 0, largest + jnp.log2(total), -jnp.inf
        )
        for piece, (acc, where) in enumerate(zip(accs, columns, strict=True)):
            if piece:
                plgpu.wait_smem_to_gmem(0)
            scratch["spare"][...] = acc
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(
                scratch["spare"].at[used], outs[1].at[(*place, used, where)]
            )
        plgpu.copy_smem_to_gmem(scratch["sums"].at[0], outs[2].at[place])

    if config.max_parts == 1:
        write_rows()
    else:
        pl.when(unit.is_whole)(write_rows)
        pl.when(jnp.logical_not(unit.is_whole))(write_part)
