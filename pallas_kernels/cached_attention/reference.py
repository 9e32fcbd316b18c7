"""The definition in plain JAX, which is also `implementation="xla"`.

    out[w] = sum_c softmax_c(scale * q[w]·k[c]) v[c]   over the keys c that row w sees

Scores and softmax are float32; what no row of a run sees is replaced by zero, so that
it may hold anything.
"""

import jax
import jax.numpy as jnp

from pallas_kernels import pages, products
from pallas_kernels.cached_attention import runs as runs_lib


def attend(
    query: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    runs: runs_lib.Runs,
    *,
    page_table: jax.Array | None,
    window: int | None,
    scale: float,
) -> jax.Array:
    """Attention output [T, H, E]; rows outside all runs hold anything."""
    total, heads, width = query.shape
    count, length = runs.num_keys.shape
    slot = jnp.maximum(runs.slot, 0)
    if page_table is None:
        if not runs.is_identity:
            keys, values = keys[slot], values[slot]
    else:
        table = page_table if runs.is_identity else page_table[slot]
        keys, values = pages.gather(keys, table), pages.gather(values, table)
    kv_heads, capacity = keys.shape[1], keys.shape[2]
    row = runs.first_row[:, None] + jnp.arange(length, dtype=jnp.int32)[None]
    if not runs.is_uniform:
        query = query[jnp.minimum(row, total - 1)]  # [N, W, H, E]
    grouped = query.reshape(count, length, kv_heads, heads // kv_heads, width)
    scores = products.einsum("nwghe,ngce->ngwhc", grouped, keys)
    position = jnp.arange(capacity, dtype=jnp.int32)
    seen = runs.num_keys[..., None]  # [N, W, 1]
    visible = position[None, None] < seen
    if window is not None:
        visible = visible & (position[None, None] >= seen - window)
    visible = visible[:, None, :, None]  # [N, 1, W, 1, C]
    # finfo.min, not -inf: a row that sees nothing must stay finite.
    scores = jnp.where(visible, scores * jnp.float32(scale), jnp.finfo(jnp.float32).min)
    weights = jnp.where(visible, jax.nn.softmax(scores, axis=-1), 0)
    by_any = jnp.any(visible, axis=(1, 2, 3))[:, None, :, None]  # [N, 1, C, 1]
    values = jnp.where(by_any, values, jnp.zeros_like(values))
    out = products.einsum("ngwhc,ngce->nwghe", weights.astype(values.dtype), values)
    out = out.reshape(count, length, heads, width).astype(query.dtype)
    if runs.is_uniform:
        return out.reshape(total, heads, width)
    exists = jnp.arange(length, dtype=jnp.int32)[None] < runs.num_rows[:, None]
    row = jnp.where(exists, row, total)  # out of bounds: dropped
    empty = jnp.zeros((total, heads, width), query.dtype)
    return empty.at[row].set(out, mode="drop")
