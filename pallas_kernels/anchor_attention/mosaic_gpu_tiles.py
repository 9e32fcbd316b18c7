"""What the three kernels of `mosaic_gpu` share: copies of tiles, layouts and masks."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.anchor_attention.mosaic_gpu_plan import ROWS, Shape

# Below all scores, and finite: -inf - FLOOR is -inf, whose exp2 is 0, and not NaN.
FLOOR = -3e38
# Registers of a thread. A launch of three warpgroups has 168 each: the sum must not be
# more, or the increase waits forever.
MULTIPLYING, READING = 232, 40
REDUCTIONS = 512  # bytes for reductions, none of which crosses warps
OVERHEAD = 2048 + REDUCTIONS  # barriers, and what aligns the buffers
TILED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
LOG2E = math.log2(math.e)

load: Any = functools.partial(plgpu.load, optimized=False)


def by_row() -> Any:
    """The layout of one number a row of a tile."""
    return plgpu.Layout.WGMMA.reduce(1)


def by_column() -> Any:
    """The layout of one number a column of a tile."""
    return plgpu.Layout.WGMMA.reduce(0)


def over_rows(vector: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """One number a row, for every column."""
    return jax.lax.broadcast_in_dim(vector, shape, [0])


def over_columns(vector: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """One number a column, for every row."""
    return jax.lax.broadcast_in_dim(vector, shape, [1])


def positions(start: Any, shape: tuple[int, ...], axis: int) -> jax.Array:
    """start + index along an axis of a tile."""
    return start + plgpu.broadcasted_iota(
        jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA
    )


def tiled(*shape: int, dtype: Any) -> Any:
    """Shared memory that wgmma reads."""
    return plgpu.SMEM(shape, dtype, transforms=TILED)


def blocks_of(table: Any, tile: Any, shape: Shape) -> list[Any]:
    """The blocks of a tile; -1 where there is none."""
    return [table[tile, number] for number in range(shape.blocks)]


def _slots(block: Any, shape: Shape) -> Any:
    # Beyond the last slot, copies read zeros and store nothing. A start that is known
    # while tracing would be checked against the array's size.
    start = jnp.minimum(block, 0) * shape.slot_rows
    return pl.ds(start, shape.slot_rows)


def clear(tile: Any) -> None:
    """Zeros for what copies leave of a tile: masked, but it must be finite."""
    tile[...] = plgpu.layout_cast(jnp.zeros(tile.shape, tile.dtype), plgpu.Layout.WGMMA)


def has_spare_rows(shape: Shape) -> bool:
    """Whether `read_rows` leaves rows of a tile."""
    return shape.blocks * shape.group * shape.slot_rows < ROWS


def read_rows(
    source: Any, head: Any, blocks: list[Any], into: Any, barrier: Any, shape: Shape
) -> None:
    """Copies a tile of rows of [B * A, K, H, E]: `row_copies` arrivals."""
    for place, block in enumerate(blocks):
        block = jnp.maximum(block, 0)
        for beside in range(shape.group):
            at = (place * shape.group + beside) * shape.slot_rows
            plgpu.copy_gmem_to_smem(
                source.at[block, _slots(block, shape), head * shape.group + beside],
                into.at[pl.ds(at, shape.slot_rows)],
                barrier,
            )


def row_copies(shape: Shape) -> int:
    """Copies of `read_rows`."""
    return shape.blocks * shape.group


def read_own(
    source: Any, head: Any, blocks: list[Any], into: Any, barrier: Any, shape: Shape
) -> None:
    """Copies own keys or values, [B * A, K, G, E]: an arrival a block."""
    for place, block in enumerate(blocks):
        block = jnp.maximum(block, 0)
        plgpu.copy_gmem_to_smem(
            source.at[block, _slots(block, shape), head],
            into.at[pl.ds(place * shape.slot_rows, shape.slot_rows)],
            barrier,
        )


def write_rows(
    source: Any, target: Any, head: Any, blocks: list[Any], shape: Shape
) -> None:
    """Starts to store a tile of rows where they belong."""
    for number, block in enumerate(blocks):

        @pl.when(block >= 0)
        def _(number=number, block=block):
            for beside in range(shape.group):
                at = (number * shape.group + beside) * shape.slot_rows
                plgpu.copy_smem_to_gmem(
                    source.at[pl.ds(at, shape.slot_rows)],
                    target.at[block, _slots(block, shape), head * shape.group + beside],
                )


def write_own(
    source: Any, target: Any, head: Any, blocks: list[Any], shape: Shape
) -> None:
    """The same for own keys or values."""
    for number, block in enumerate(blocks):

        @pl.when(block >= 0)
        def _(number=number, block=block):
            plgpu.copy_smem_to_gmem(
                source.at[pl.ds(number * shape.slot_rows, shape.slot_rows)],
                target.at[block, _slots(block, shape), head],
            )


def unit(number: Any, shape: Shape, warpgroups: int) -> tuple[Any, Any, Any]:
    """(sequence, head, first tile of rows) of a worker; longest contexts first."""
    head = jax.lax.rem(number, shape.kv_heads)
    rest = jax.lax.div(number, shape.kv_heads)
    sequence = jax.lax.rem(rest, shape.batch)
    place = shape.tiles // warpgroups - 1 - jax.lax.div(rest, shape.batch)
    return sequence, head, sequence * shape.tiles + place * warpgroups


def stream(
    source: Any,
    line: Any,
    count: Any,
    name: str,
    scratch: dict[str, Any],
    *,
    stages: int,
    key_tile: int,
    before: Any = None,
) -> None:
    """Reads `count` tiles of keys or values into their ring, in the order of their use.

    Args:
      source: [B * G, S, E]; a tile's rows beyond S are filled with zeros.
      line: of the source.
      count: number of tiles.
      name: of the ring.
      scratch: the ring and its barriers.
      stages: of the ring.
      key_tile: keys a tile.
      before: called with a tile's number before it is read.
    """

    def read(step, carry):
        del carry
        buffer = jax.lax.rem(step, stages)
        if before is not None:
            before(step)

        @pl.when(step >= stages)
        def _():
            plgpu.barrier_wait(scratch[f"{name}_read"].at[buffer])

        plgpu.copy_gmem_to_smem(
            source.at[line, pl.ds(step * key_tile, key_tile)],
            scratch[name].at[buffer],
            scratch[f"{name}_filled"].at[buffer],
        )

    jax.lax.fori_loop(0, count, read, None)
    drain(f"{name}_read", count, scratch, stages=stages)


def by_warp(*functions: Callable[[], None]) -> None:
    """Runs each function in a warp of its own."""

    @plgpu.warp_map
    def _(warp):
        for number, function in enumerate(functions):
            pl.when(warp == number)(function)


def drain(name: str, count: Any, scratch: dict[str, Any], *, stages: int) -> None:
    """Every phase of a barrier is awaited before a worker ends."""
    for buffer in range(stages):

        @pl.when(buffer < count)
        def _(buffer=buffer):
            plgpu.barrier_wait(scratch[name].at[buffer])


def weights(
    score: jax.Array,
    scale: float,
    sums: jax.Array,
    over: Callable[[jax.Array, tuple[int, ...]], jax.Array],
) -> jax.Array:
    """P = 2^(S - z) of a tile of products and its z, by `over_rows` or the other."""
    return jnp.exp2(score * jnp.float32(scale * LOG2E) - over(sums, score.shape))


def over_context(
    step: Callable[..., Any], carry: Any, low: Any, count: Any, *, key_tile: int
) -> Any:
    """Takes a step for each of the context's tiles of keys.

    Args:
      step: of a tile's number, the carry and, by name, `is_masked`: whether some row
        does not see the whole tile.
      carry: of the first step.
      low: keys that all rows see.
      count: number of tiles that some row sees.
      key_tile: keys a tile.
    """
    whole = jnp.minimum(jax.lax.div(low, key_tile), count)
    carry = jax.lax.fori_loop(0, whole, functools.partial(step, is_masked=False), carry)
    return jax.lax.fori_loop(
        whole, count, functools.partial(step, is_masked=True), carry
    )


def key_rings(
    stages: int, key_tile: int, shape: Shape, *, readers: int, dtype: Any
) -> dict[str, Any]:
    """Rings of tiles of keys and of values, and their barriers.

    Args:
      stages: tiles a ring.
      key_tile: keys a tile.
      shape: see there.
      readers: warpgroups that read every tile.
      dtype: of keys and values.
    """
    found = {}
    for name in ("keys", "values"):
        found[name] = tiled(stages, key_tile, shape.width, dtype=dtype)
        found[f"{name}_filled"] = plgpu.Barrier(num_barriers=stages)
        found[f"{name}_read"] = plgpu.Barrier(num_arrivals=readers, num_barriers=stages)
    return found


def launch(
    worker: Callable[..., None],
    *arrays: jax.Array,
    out_type: Any,
    scratch: dict[str, Any],
    workers: int,
    warpgroups: int,
    interpret: Any,
    **static: Any,
) -> Any:
    """Runs a kernel of `workers` blocks: warpgroups that multiply, and one that reads.

    Args:
      worker: the body: references of arrays, results and scratch, then `static`.
      arrays: its operands.
      out_type: shapes of its results.
      scratch: what a worker allocates.
      workers: how many.
      warpgroups: that multiply.
      interpret: parameters of the interpreter.
      static: what else the body is given by name.
    """
    body = functools.partial(worker, **static, interpret=interpret is not None)
    kernel = plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=(scratch,),
        grid=(workers,),
        grid_names=("worker",),
        num_threads=warpgroups + 1,
        thread_name="role",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, reduction_scratch_bytes=REDUCTIONS
        ),
        interpret=interpret,
    )
    return kernel(*arrays)


def vector_shape(shape: Shape) -> Any:
    """A float32 for every row of every tile and kv head."""
    return jax.ShapeDtypeStruct(
        (shape.batch * shape.tiles, shape.kv_heads, ROWS), jnp.float32
    )
