"""The kernel for TPUs: a grid over (tile of rows, kv head, tile of keys).

Numbers of keys and the page table are prefetched as scalars, so that the index map of
the keys skips what no row sees: a block that is asked for twice in a row is not copied
again. No TPU has run it; it is interpreted, lowered and compiled for v5e and v6e only.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.cached_attention import runs as runs_lib
from pallas_kernels.cached_attention.tuning import MosaicTpuConfig

FLOOR = -3e38  # below all scores, and finite


def supports(query: Any, keys: Any, *, paged: bool) -> str | None:
    """Why the kernel can't run these arrays, or None if it can.

    Args:
      query: [T, H, E]; keys: [B, G, C, E] or pages; only shapes and dtypes are read.
    """
    width = query.shape[2]
    if query.dtype not in (jnp.bfloat16, jnp.float32) or keys.dtype != query.dtype:
        return (
            "keys and queries must be bfloat16 or float32 and of one dtype, got "
            f"{query.dtype} and {keys.dtype}"
        )
    if width not in (64, 128, 256):
        return f"head width must be 64, 128 or 256, got {width}"
    if paged and keys.shape[2] % 16:
        return f"the page size must be a multiple of 16, got {keys.shape[2]}"
    return None


def attend(
    query: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    runs: runs_lib.Runs,
    *,
    page_table: jax.Array | None,
    window: int | None,
    scale: float,
    config: MosaicTpuConfig,
    interpret: Any = False,
) -> jax.Array:
    """Attention output [T, H, E]; rows outside all runs hold anything."""
    total, heads, width = query.shape
    kv_heads, key_rows = keys.shape[1], keys.shape[2]
    group = heads // kv_heads
    paged = page_table is not None
    key_tile = key_rows if paged else config.key_tile
    capacity = key_rows * (page_table.shape[1] if page_table is not None else 1)
    length = min(runs.num_keys.shape[1] * group, max(config.max_rows, group))
    rows = -(-(length // group * group) // 16) * 16
    spans = runs_lib.spans(
        runs, rows=rows, rows_per_token=group, key_tile=key_tile, window=window
    )
    folded = runs_lib.fold(query, spans, kv_heads)  # [N', G, rows, E]
    count = folded.shape[0]
    table = jnp.zeros((1, 1), jnp.int32)
    if page_table is not None:  # entries beyond a slot's keys may be anything
        table = jnp.clip(page_table, 0, keys.shape[0] - 1)

    def key_block(tile, head, step, bounds, table):
        last = bounds[tile, 3] + bounds[tile, 4] - 1
        at = jnp.minimum(bounds[tile, 3] + step, last)
        slot = bounds[tile, 0]
        return (table[slot, at], head, 0, 0) if paged else (slot, head, at, 0)

    def row_block(tile, head, step, bounds, table):
        return tile, head, 0, 0

    kernel = pl.pallas_call(
        functools.partial(_step, key_tile=key_tile, window=window, scale=scale),
        out_shape=jax.ShapeDtypeStruct(folded.shape, query.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(count, kv_heads, -(-capacity // key_tile)),
            in_specs=[
                pl.BlockSpec((1, rows, 1), lambda tile, head, step, *_: (tile, 0, 0)),
                pl.BlockSpec((1, 1, rows, width), row_block),
                pl.BlockSpec((1, 1, key_tile, width), key_block),
                pl.BlockSpec((1, 1, key_tile, width), key_block),
            ],
            out_specs=pl.BlockSpec((1, 1, rows, width), row_block),
            scratch_shapes=[
                pltpu.VMEM((rows, width), jnp.float32),
                pltpu.VMEM((rows, 1), jnp.float32),
                pltpu.VMEM((rows, 1), jnp.float32),
            ],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary")
        ),
        interpret=interpret,
        name="cached_attention",
    )
    bounds = jnp.stack(
        [
            spans.slot,
            spans.first_key,
            spans.end_key,
            spans.first_tile,
            spans.num_tiles,
        ],
        axis=1,
    )
    out = kernel(
        bounds,
        table,
        spans.limits[..., None],
        folded,
        keys,
        values,
    )
    return runs_lib.unfold(out, spans, total, heads)


def _step(
    bounds,
    table,
    limits,
    query,
    keys,
    values,
    out,
    acc,
    largest,
    total,
    *,
    key_tile: int,
    window: int | None,
    scale: float,
) -> None:
    del table  # read by the index map
    tile, step = pl.program_id(0), pl.program_id(2)

    @pl.when(step == 0)
    def _():
        acc[...] = jnp.zeros_like(acc)
        largest[...] = jnp.full_like(largest, FLOOR)
        total[...] = jnp.zeros_like(total)

    @pl.when(step < bounds[tile, 4])
    def _():
        start = (bounds[tile, 3] + step) * key_tile
        precision = (
            jax.lax.Precision.HIGHEST
            if query.dtype == jnp.float32
            else jax.lax.Precision.DEFAULT
        )
        score = jax.lax.dot_general(
            query[0, 0],
            keys[0, 0],
            (((1,), (1,)), ((), ())),
            precision=precision,
            preferred_element_type=jnp.float32,
        )
        position = start + jax.lax.broadcasted_iota(jnp.int32, score.shape, 1)
        limit = limits[0]  # [rows, 1]
        visible = position < limit
        if window is not None:
            visible = visible & (position >= limit - window)
        score = jnp.where(visible, score * jnp.float32(scale), -jnp.inf)
        new = jnp.maximum(largest[...], jnp.max(score, axis=1, keepdims=True))
        decay = jnp.exp(largest[...] - new)
        weight = jnp.exp(score - new)
        # What no row sees may be anything, and 0 * NaN is NaN.
        value = values[0, 0]
        at = start + jax.lax.broadcasted_iota(jnp.int32, value.shape, 0)
        read = (at >= bounds[tile, 1]) & (at < bounds[tile, 2])
        value = jnp.where(read, value, jnp.zeros_like(value))
        part = jax.lax.dot_general(
            weight.astype(value.dtype),
            value,
            (((1,), (0,)), ((), ())),
            precision=precision,
            preferred_element_type=jnp.float32,
        )
        acc[...] = acc[...] * decay + part
        largest[...] = new
        total[...] = total[...] * decay + jnp.sum(weight, axis=1, keepdims=True)

    @pl.when(step == pl.num_programs(2) - 1)
    def _():
        share = jnp.where(total[...] > 0, total[...], 1.0)
        out[0, 0] = (acc[...] / share).astype(out.dtype)
