"""Attention of a few new rows over a cached context: drafting and verifying.

Both functions read keys and values where they lie in a cache, dense [B, G, C, E] or
paged [num_pages, G, page, E] with a table int32 [slots, max_pages]: position p of slot
s is row p % page of page table[s, p // page]. Table entries beyond a slot's keys may be
anything. A row sees the keys before its own `num_keys`; what no row sees may hold
anything.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import _compat, _dispatch
from pallas_kernels.cached_attention import (
    mosaic_gpu,
    mosaic_tpu,
    reference,
    triton,
    tuning,
)
from pallas_kernels.cached_attention import runs as runs_lib

PREFERRED = {"gpu": ("mosaic_gpu", "triton"), "tpu": ("mosaic_tpu",), "cpu": ("xla",)}


def block_attention(
    query: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    *,
    num_keys: jax.Array,
    page_table: jax.Array | None = None,
    slots: jax.Array | None = None,
    window: int | None = None,
    scale: float | None = None,
    implementation: str | None = None,
    config: Any = None,
) -> jax.Array:
    """Attention of a draft block: all K rows of a request see the same keys.

    The block's own keys and values are the last K of them, already in the cache, so
    that rows see one another in both directions.

    Args:
      query: [B, K, H, E].
      keys: [B', G, C, E], or pages [num_pages, G, page, E].
      values: as keys.
      num_keys: int32 [B]; 0 gives zeros.
      page_table: int32 [slots, max_pages] for a paged cache.
      slots: int32 [B], the row of the cache or of the table; None = row b.
      window: a row sees the last `window` of its keys only; None = all.
      scale: factor of the scores; None = E**-0.5.
      implementation: "xla", "mosaic_gpu", "triton" or "mosaic_tpu"; None = the first
        that can run these arrays on the default backend.
      config: that implementation's settings (see `tuning`); None = by its table.

    Returns:
      [B, K, H, E], in the query's dtype.

    Raises:
      ValueError: shapes that don't fit one another, or an unknown implementation.
      NotImplementedError: the named implementation can't run these arrays.
    """
    _check_rank("query", query, 4)
    batch, rows, heads, width = query.shape
    _check_cache(query, keys, values, page_table, heads, window)
    _check_int("num_keys", num_keys, (batch,))
    available = keys.shape[0] if page_table is None else page_table.shape[0]
    if slots is not None:
        _check_int("slots", slots, (batch,))
    elif available != batch:
        raise ValueError(
            f"without `slots` the cache must have a row a request, B = {batch}, got "
            f"{available}"
        )
    runs = runs_lib.of_blocks(num_keys, slots, rows)
    out = _attend(
        query.reshape(batch * rows, heads, width),
        keys,
        values,
        runs,
        page_table=page_table,
        window=window,
        scale=scale,
        implementation=implementation,
        config=config,
    )
    return out.reshape(query.shape)


def verify_attention(
    query: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    *,
    num_keys: jax.Array,
    slots: jax.Array | None = None,
    max_rows: int | None = None,
    page_table: jax.Array | None = None,
    window: int | None = None,
    scale: float | None = None,
    implementation: str | None = None,
    config: Any = None,
) -> jax.Array:
    """Attention of verified rows, each of which sees the keys up to its own.

    A row at position p has `num_keys` = p + 1, its own key being in the cache already.
    Packed rows of one slot are consecutive, 1 to `max_rows` of them; windows have W
    rows each, window b reads row b of the cache or of the table.

    Args:
      query: packed rows [T, H, E], or windows [B, W, H, E].
      keys: [B, G, C, E], or pages [num_pages, G, page, E].
      values: as keys.
      num_keys: int32 [T] or [B, W]; 0 = padding.
      slots: int32 [T], the row of the cache or of the table; -1 = padding. None with
        windows.
      max_rows: static; rows a slot has at most (K + 1). None with windows.
      page_table: int32 [slots, max_pages] for a paged cache.
      window: as for `block_attention`, and so on.
      scale: as there.
      implementation: as there.
      config: as there.

    Returns:
      As the query; padding rows are zero.

    Raises:
      ValueError: shapes that don't fit one another, or an unknown implementation.
      NotImplementedError: the named implementation can't run these arrays.
    """
    _check_rank("query", query, 4 if slots is None else 3)
    heads, width = query.shape[-2:]
    _check_cache(query, keys, values, page_table, heads, window)
    available = keys.shape[0] if page_table is None else page_table.shape[0]
    if slots is None:
        if query.shape[0] != available:
            raise ValueError(
                "windows must be as many as rows of the cache, or of the table, "
                f"{available}, got {query.shape[0]}"
            )
        _check_int("num_keys", num_keys, query.shape[:2])
        runs = runs_lib.of_windows(num_keys)
    else:
        total = query.shape[0]
        _check_int("slots", slots, (total,))
        _check_int("num_keys", num_keys, (total,))
        if max_rows is None or not max_rows >= 1:
            raise ValueError(f"`max_rows` must be at least 1, got {max_rows}")
        runs = runs_lib.of_packed(
            slots, num_keys, num_slots=available, max_rows=min(max_rows, total)
        )
    out = _attend(
        query.reshape(-1, heads, width),
        keys,
        values,
        runs,
        page_table=page_table,
        window=window,
        scale=scale,
        implementation=implementation,
        config=config,
    )
    return out.reshape(query.shape)


def fastest(query: Any, keys: Any, *, rows: int, page_table: Any | None = None) -> str:
    """The implementation that was measured fastest here: "mosaic_gpu" or "xla".

    Where nothing was measured, and on all other platforms, it is "xla". On several
    devices too, outside of `shard_map`: a partitioner would gather a kernel's operands.

    Args:
      query: [.., H, E]; only shapes and dtypes are read.
      keys: the cache, dense or pages.
      rows: of a window at most.
      page_table: [slots, max_pages] for a paged cache.
    """
    if _dispatch.platform() != "gpu" or not _compat.is_unpartitioned():
        return "xla"
    flat = jax.ShapeDtypeStruct((1, *query.shape[-2:]), query.dtype)
    paged = page_table is not None
    refusal = _dispatch.first_of(
        _dispatch.needs_hopper, lambda: mosaic_gpu.supports(flat, keys, paged=paged)
    )
    if refusal() is not None:
        return "xla"
    pool, kv_heads, key_rows, width = keys.shape
    positions = pool * key_rows
    if page_table is not None:
        positions = page_table.shape[0] * page_table.shape[1] * key_rows
    is_faster = tuning.mosaic_gpu_is_faster(
        num_bytes=2 * positions * kv_heads * width * keys.dtype.itemsize,
        folded_rows=rows * (query.shape[-2] // kv_heads),
    )
    return "mosaic_gpu" if is_faster else "xla"


def _attend(
    query: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    runs: runs_lib.Runs,
    *,
    page_table: jax.Array | None,
    window: int | None,
    scale: float | None,
    implementation: str | None,
    config: Any,
) -> jax.Array:
    paged = page_table is not None
    refusals: dict[str, _dispatch.Refusal] = {
        "xla": lambda: None,
        "mosaic_gpu": lambda: mosaic_gpu.supports(
            query, keys, paged=paged, config=config if implementation else None
        ),
        "triton": lambda: triton.supports(query, keys, paged=paged),
        "mosaic_tpu": lambda: mosaic_tpu.supports(query, keys, paged=paged),
    }
    if implementation is None:
        refusals["mosaic_gpu"] = _dispatch.first_of(
            _dispatch.needs_hopper, refusals["mosaic_gpu"]
        )
    name = _dispatch.choose(implementation, refusals, PREFERRED)
    common: dict[str, Any] = {
        "page_table": page_table,
        "window": window,
        "scale": query.shape[-1] ** -0.5 if scale is None else scale,
    }
    if name == "mosaic_gpu":
        if config is None:
            config = mosaic_gpu.default_config(query, keys, runs, page_table)
        # It clears the rows that are of no run itself.
        return mosaic_gpu.attend(query, keys, values, runs, config=config, **common)
    if name == "xla":
        out = reference.attend(query, keys, values, runs, **common)
    elif name == "mosaic_tpu":
        config = tuning.MosaicTpuConfig() if config is None else config
        out = mosaic_tpu.attend(query, keys, values, runs, config=config, **common)
    else:
        if config is None:
            config = triton.default_config(query, keys, runs, page_table)
        out = triton.attend(query, keys, values, runs, config=config, **common)
    if runs.is_row is None:
        return out
    return jnp.where(runs.is_row[:, None, None], out, jnp.zeros_like(out))


def _check_rank(name: str, array: Any, rank: int) -> None:
    if array.ndim != rank:
        raise ValueError(f"`{name}` must have {rank} axes, got shape {array.shape}")


def _check_int(name: str, array: Any, shape: tuple[int, ...]) -> None:
    if array.shape != shape or array.dtype != jnp.int32:
        raise ValueError(
            f"`{name}` must be int32 of shape {shape}, got {array.dtype} {array.shape}"
        )


def _check_cache(
    query: Any, keys: Any, values: Any, page_table: Any, heads: int, window: int | None
) -> None:
    _check_rank("keys", keys, 4)
    if values.shape != keys.shape or values.dtype != keys.dtype:
        raise ValueError(
            f"`values` must be like `keys`, {keys.dtype} {keys.shape}, got "
            f"{values.dtype} {values.shape}"
        )
    if keys.shape[-1] != query.shape[-1]:
        raise ValueError(
            f"`keys` must have the query's head width, {query.shape[-1]}, got "
            f"{keys.shape[-1]}"
        )
    if heads % keys.shape[1]:
        raise ValueError(
            f"query heads must be a multiple of kv heads, got {heads} and "
            f"{keys.shape[1]}"
        )
    if page_table is not None:
        _check_rank("page_table", page_table, 2)
        _check_int("page_table", page_table, page_table.shape)
    if window is not None and window < 1:
        raise ValueError(f"`window` must be at least 1, got {window}")
