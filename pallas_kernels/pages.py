"""Pages of a cache, read as if they lay in one piece."""

import jax
import jax.numpy as jnp


def gather(pages: jax.Array, table: jax.Array) -> jax.Array:
    """Dense [N, G, M * P, E] from pages [num_pages, G, P, E] and a table [N, M].

    One gather makes the layout that attention wants: no transposed copy follows.
    Entries of the table that name no page read some page.
    """
    num_pages, num_kv_heads, page_size, width = pages.shape
    heads = jnp.arange(num_kv_heads, dtype=jnp.int32)[None, :, None]
    index = jnp.clip(table, 0, num_pages - 1)[:, None] * num_kv_heads + heads
    flat = pages.reshape(num_pages * num_kv_heads, page_size, width)
    return flat[index].reshape(table.shape[0], num_kv_heads, -1, width)
