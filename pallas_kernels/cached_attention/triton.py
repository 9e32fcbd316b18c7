"""The kernel for NVIDIA GPUs from Ampere on, in Triton, called by jax-triton.

An extra: jax-triton and triton are imported when it runs. A program reads one part of
one unit's keys; its query rows are loaded from where they lie.
"""

import importlib.util
import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.cached_attention import combine as combine_lib
from pallas_kernels.cached_attention import runs as runs_lib
from pallas_kernels.cached_attention import tuning


def supports(query: Any, keys: Any, *, paged: bool) -> str | None:
    """Why the kernel can't run these arrays, or None if it can.

    Args:
      query: [T, H, E]; keys: [B, G, C, E] or pages; only shapes and dtypes are read.
    """
    for package in ("jax_triton", "triton"):
        if importlib.util.find_spec(package) is None:
            return (
                f"the package {package} is not installed "
                "(pip install 'dspark-jax[triton]')"
            )
    known = (jnp.bfloat16, jnp.float16, jnp.float32)
    if query.dtype not in known or keys.dtype != query.dtype:
        return (
            "keys and queries must be bfloat16, float16 or float32 and of one dtype, "
            f"got {query.dtype} and {keys.dtype}"
        )
    if query.shape[2] not in (64, 128, 256):
        return f"head width must be 64, 128 or 256, got {query.shape[2]}"
    return None


def default_config(
    query: Any, keys: Any, runs: runs_lib.Runs, page_table: Any
) -> tuning.TritonConfig:
    """What the table says for these shapes."""
    units = runs.num_keys.shape[0] * keys.shape[1]
    capacity = keys.shape[2] * (1 if page_table is None else page_table.shape[1])
    return tuning.triton(
        units, capacity, width=keys.shape[3], itemsize=keys.dtype.itemsize
    )


def attend(
    query: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    runs: runs_lib.Runs,
    *,
    page_table: jax.Array | None,
    window: int | None,
    scale: float,
    config: tuning.TritonConfig,
) -> jax.Array:
    """Attention output [T, H, E]; rows outside all runs hold anything."""
    import jax_triton

    from pallas_kernels.cached_attention import triton_kernel

    total, heads, width = query.shape
    kv_heads, key_rows = keys.shape[1], keys.shape[2]
    group = heads // kv_heads
    length = runs.num_keys.shape[1]
    rows = min(max(16, 1 << (length * group - 1).bit_length()), 64)
    rows = max(rows, 1 << (group - 1).bit_length())
    spans = runs_lib.spans(
        runs, rows=rows, rows_per_token=group, key_tile=config.key_tile, window=window
    )
    count, parts = spans.num_tiles.shape[0], config.num_parts
    table = jnp.zeros((1, 1), jnp.int32)
    if page_table is not None:  # entries beyond a slot's keys may be anything
        table = jnp.clip(page_table, 0, keys.shape[0] - 1)
    shape = (total, kv_heads, group, width)
    direct = parts == 1
    outs, sums = jax_triton.triton_call(
        query,
        keys,
        values,
        table,
        jnp.stack(
            [
                spans.first_row,
                spans.num_rows,
                spans.slot,
                spans.first_key,
                spans.end_key,
                spans.first_tile,
                spans.num_tiles,
            ]
        ),
        spans.limits,
        kernel=triton_kernel.kernel,
        out_shape=(
            jax.ShapeDtypeStruct(
                shape if direct else (parts, *shape),
                query.dtype if direct else jnp.float32,
            ),
            jax.ShapeDtypeStruct((parts, count * kv_heads, rows), jnp.float32),
        ),
        grid=(count, kv_heads, parts),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        total=total,
        count=count,
        kv_heads=kv_heads,
        group=group,
        width=width,
        rows=rows,
        key_tile=config.key_tile,
        key_rows=key_rows,
        pages=table.shape[1],
        parts=parts,
        paged=page_table is not None,
        window=0 if window is None else window,
        to_log2=scale * math.log2(math.e),
        precise=query.dtype == jnp.float32,
    )
    if not direct:
        share = -(-spans.num_tiles // parts)
        used = -(-spans.num_tiles // share)  # [N']
        index = jnp.arange(parts, dtype=jnp.int32)[:, None, None]
        exists = index < jnp.broadcast_to(used[None, :, None], (1, count, kv_heads))
        outs = combine_lib.combine(outs, sums, exists, spans, query.dtype)
    return outs.reshape(total, heads, width)
