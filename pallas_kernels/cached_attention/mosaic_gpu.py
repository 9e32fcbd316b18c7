"""The kernel for NVIDIA GPUs from Hopper on, in Pallas's Mosaic GPU dialect.

One warpgroup issues TMA copies of key and value tiles into a ring of buffers, one or
two others multiply (wgmma) and keep the running softmax. Query rows come as they lie in
memory, one copy a row, and leave the same way: no kernel before or after pads or
transposes. A launch has one worker a multiprocessor; `schedule` says who reads what.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _compat, _dispatch
from pallas_kernels.cached_attention import (
    mosaic_gpu_combine,
    mosaic_gpu_softmax,
    mosaic_gpu_worker,
    tuning,
)
from pallas_kernels.cached_attention import runs as runs_lib
from pallas_kernels.cached_attention import schedule as schedule_lib
from pallas_kernels.cached_attention.mosaic_gpu_softmax import PIECE, ROWS
from pallas_kernels.cached_attention.tuning import MosaicGpuConfig

SHARED_MEMORY = 232_448  # bytes a block may have on Hopper


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
        if config.warpgroups > 1 and (width > PIECE or config.stages % 2):
            return (
                f"two warpgroups need head widths up to {PIECE} and an even number of "
                f"stages, got {width} and {config.stages}"
            )
        needed = mosaic_gpu_worker.shared_memory(width, config)
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
    """Attention output [T, H, E]; rows outside all runs are zero."""
    total, heads, width = query.shape
    kv_heads, key_rows = keys.shape[1], keys.shape[2]
    group = heads // kv_heads
    shape = mosaic_gpu_softmax.Shape(
        total_rows=total,
        kv_heads=kv_heads,
        group=group,
        pieces=-(-width // PIECE),
        piece=min(width, PIECE),
        key_rows=key_rows,
        rows=min(runs.num_keys.shape[1], ROWS // group),
        copies=max(config.key_tile // key_rows, 1) if page_table is not None else 1,
        paged=page_table is not None,
        pages=1 if page_table is None else page_table.shape[1],
        has_padding=runs.is_row is not None,
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
    whole = jax.ShapeDtypeStruct((total, kv_heads, group, width), query.dtype)
    if config.max_parts == 1:
        workers = min(config.workers, units)
        plan = schedule_lib.whole_units(spans.num_tiles, kv_heads, workers)
        out_type = [whole]
    else:
        workers = config.workers
        plan = schedule_lib.equal_shares(
            spans.num_tiles, kv_heads, workers, config.max_parts
        )
        parts = config.max_parts
        out_type = [
            whole,
            jax.ShapeDtypeStruct((parts, count, kv_heads, ROWS, width), jnp.float32),
            jax.ShapeDtypeStruct((parts, count, kv_heads, ROWS), jnp.float32),
        ]
    kernel = plgpu.kernel(
        functools.partial(
            mosaic_gpu_worker.worker,
            shape=shape,
            config=config,
            workers=workers,
            window=window,
            scale=scale,
        ),
        out_type=out_type,
        scratch_types=(mosaic_gpu_worker.scratch_types(shape, config, query.dtype),),
        grid=(workers,),
        grid_names=("worker",),
        num_threads=config.warpgroups + 1,
        thread_name="role",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            reduction_scratch_bytes=mosaic_gpu_worker.REDUCTIONS,
        ),
        interpret=interpret,
    )
    table = jnp.zeros((1, 1), jnp.int32)
    if page_table is not None:  # entries beyond a slot's keys may be anything
        table = jnp.clip(page_table, 0, keys.shape[0] - 1)
    # The worker reads the first rows of it, the combine also the last ones.
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
            *plan.num_parts.T,
        ]
    )
    shares = jnp.stack(
        [plan.first_unit, plan.num_units, jnp.broadcast_to(plan.share, (workers,))]
    )
    out, *parts_out = kernel(
        query.reshape(total, kv_heads, group, width),
        keys,
        values,
        table,
        spans_table,
        spans.limits,
        shares,
        *([] if runs.is_row is None else [runs.is_row.astype(jnp.int32)]),
    )
    if config.max_parts > 1:
        out = mosaic_gpu_combine.combine(
            out,
            *parts_out,
            spans_table,
            rows=shape.rows,
            interpret=interpret,
        )
    return out.reshape(total, heads, width)
