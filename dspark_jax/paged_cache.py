"""A key-value cache in pages, for many requests of different lengths.

Position p of a request lies in page `table[p // P]` at row p % P. A page is [G, P, E]:
the rows of one head are contiguous, as in `kv_cache.DenseCache`, so that one attention
kernel reads both. The pool is what a program donates; a `PagedCache` is the pool as B
requests see it, with the methods of a `DenseCache`.

Windows of different lengths are packed: T rows of all requests, one after the other,
with a `RowLayout` that says whose each row is. A target that is built on
`cache.attend(layer, q, k, v, positions)` then runs on [1, T] rows unchanged.

Nothing is erased when a page changes hands. A row sees positions up to its own only,
and values beyond a request's last position count as zero: a NaN that another request
left behind reaches nobody.
"""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dspark_jax import attention, kv_cache, layers
from pallas_kernels import pages as kernel_pages


class RowLayout(flax.struct.PyTreeNode):
    """Where the rows of B windows of up to W rows lie among T packed rows."""

    request: jax.Array  # int32 [T], 0..B-1; B = padding
    offset: jax.Array  # int32 [T], row within its window
    rows: jax.Array  # int32 [B, W], packed row of each row of a window; T = absent

    def pack(self, dense: Array, fill: Any) -> Array:
        """Rows [B, W, ...] as packed rows [T, ...]; padding is `fill`."""
        return dense.at[self.request, self.offset].get(mode="fill", fill_value=fill)

    def unpack(self, packed: Array, fill: Any) -> Array:
        """Packed rows [T, ...] as rows [B, W, ...]; absent ones are `fill`."""
        return packed.at[self.rows].get(mode="fill", fill_value=fill)


def make_layout(counts: Int[Array, "B"], num_rows: int, max_window: int) -> RowLayout:
    """The layout that packs counts[n] rows of every window, in order.

    Args:
      counts: rows of each window, 0..W; their sum must be at most T.
      num_rows: static, T.
      max_window: static, W.
    """
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    starts = ends - counts
    index = jnp.arange(num_rows, dtype=jnp.int32)
    # All against all: a search would be a loop, which splits a GPU graph.
    request = jnp.sum(ends[None] <= index[:, None], axis=1, dtype=jnp.int32)
    start = starts.at[request].get(mode="fill", fill_value=0)
    slots = jnp.arange(max_window, dtype=jnp.int32)[None]
    rows = jnp.where(slots < counts[:, None], starts[:, None] + slots, num_rows)
    return RowLayout(request=request, offset=index - start, rows=rows)


class PagePool(flax.struct.PyTreeNode):
    """All pages of all layers: keys and values [num_pages, G, P, E] a layer."""

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]
    implementation: str = flax.struct.field(pytree_node=False, default="auto")

    @classmethod
    def create(
        cls, like: kv_cache.DenseCache, num_pages: int, page_size: int
    ) -> "PagePool":
        """An empty pool with the layers, heads, dtypes and attention of a dense cache.

        `like` may be abstract (`jax.eval_shape` of a target's `init_cache`).
        """

        def pages(leaf: Any) -> jax.Array:
            _, num_kv_heads, _, width = leaf.shape
            return jnp.zeros((num_pages, num_kv_heads, page_size, width), leaf.dtype)

        return cls(
            keys=tuple(pages(leaf) for leaf in like.keys),
            values=tuple(pages(leaf) for leaf in like.values),
            implementation=like.implementation,
        )

    def view(self, table: Int[Array, "B pages"]) -> "PagedCache":
        """The pool as the B requests with these page tables see it."""
        return PagedCache(
            pool=self, table=table, layout=None, num_keys=_full(table, self.keys[0])
        )


class PagedCache(flax.struct.PyTreeNode):
    """A pool as B requests see it: a cache of B requests, or of T packed rows.

    Without a layout rows are [B, W, ...]; with one they are packed, [1, T, ...].
    """

    pool: PagePool
    table: jax.Array  # int32 [B, pages], a page's number; entries beyond the end: any
    layout: RowLayout | None
    num_keys: jax.Array  # int32 [B], positions that `context` may be read up to

    @property
    def capacity(self) -> int:
        """Positions that a page table spans."""
        return self.table.shape[1] * self.pool.keys[0].shape[2]

    def write(
        self, layer: int, key: jax.Array, value: jax.Array, positions: jax.Array
    ) -> "PagedCache":
        """Stores rows [.., G, E] at positions [..]; position -1 writes nothing."""
        num_pages, _, page_size, _ = self.pool.keys[0].shape
        flat = positions.reshape(-1)  # [T]
        if self.layout is None:
            request = jnp.repeat(
                jnp.arange(positions.shape[0], dtype=jnp.int32), positions.shape[1]
            )
        else:
            request = self.layout.request
        page = self.table.at[request, flat // page_size].get(mode="fill", fill_value=-1)
        # Out of bounds is dropped; -1 must be moved there, since it would wrap around.
        page = jnp.where((flat < 0) | (page < 0), num_pages, page)
        row = jnp.maximum(flat, 0) % page_size
        keys, values = (
            (
                *items[:layer],
                _scatter(items[layer], page, row, new),
                *items[layer + 1 :],
            )
            for items, new in ((self.pool.keys, key), (self.pool.values, value))
        )
        return self.replace(pool=self.pool.replace(keys=keys, values=values))

    def attend(
        self,
        layer: int,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        positions: jax.Array,
    ) -> tuple[jax.Array, "PagedCache"]:
        """Writes the rows, then attends causally: a row sees positions up to its own.

        Args:
          layer: 0-based.
          query: [B, W, H, E], or packed [1, T, H, E]; key, value: [.., G, E].
          positions: int32 [B, W] or [1, T]; -1 = padding.

        Returns:
          Attention output, as the query, and the cache with the rows written.
        """
        cache = self.write(layer, key, value, positions)
        if self.layout is not None:
            query, positions = query[0], positions[0]
        out = attention.attend(
            query,
            cache.pool.keys[layer],
            cache.pool.values[layer],
            attention.Place(positions, self.table, self.layout),
            implementation=self.pool.implementation,
            plain=_attend,
        )
        return out if self.layout is None else out[None], cache

    def attend_block(
        self,
        layer: int,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        positions: jax.Array,
    ) -> tuple[jax.Array, "PagedCache"]:
        """Attention of a draft block: rows see what is before it, and one another.

        A kernel reads the block where it lies. Rows for which there is no page (-1) are
        then seen by none: they are past their request's end, and never committed.

        Args:
          layer: 0-based.
          query: [B, K, H, E]; key, value: [B, K, G, E].
          positions: int32 [B, K], consecutive.

        Returns:
          As `kv_cache.DenseCache.attend_block`.
        """
        first, pages = positions[:, 0], self.pool.keys[layer]
        name = attention.choose(
            self.pool.implementation,
            query,
            pages,
            rows=query.shape[1],
            table=self.table,
        )
        if name == "xla":
            context = self.context(layer)
            return kv_cache.attend_apart(query, key, value, *context, first), self
        is_mapped = jnp.cumprod(self.table >= 0, axis=1, dtype=jnp.int32)
        mapped = jnp.sum(is_mapped, axis=1, dtype=jnp.int32)
        end = jnp.minimum(first + query.shape[1], mapped * pages.shape[2])
        cache = self.write(layer, key, value, positions)
        last = jnp.broadcast_to(end[:, None] - 1, positions.shape)
        out = attention.attend(
            query,
            cache.pool.keys[layer],
            cache.pool.values[layer],
            attention.Place(last, self.table),
            implementation=self.pool.implementation,
            plain=_attend,
        )
        return out, cache

    def context(self, layer: int) -> tuple[jax.Array, jax.Array]:
        """Keys and values [B, G, C, E] of a layer; values from `num_keys` on are 0."""
        keys, values = self.pool.keys[layer], self.pool.values[layer]
        return _gather(keys, self.table), _gather_until(
            values, self.table, self.num_keys
        )


@jax.jit  # traced once for all layers
def attend_pages(
    query: Float[Array, "B W H E"],
    keys: Float[Array, "num_pages G P E"],
    values: Float[Array, "num_pages G P E"],
    table: Int[Array, "B pages"],
    positions: Int[Array, "B W"],
) -> Float[Array, "B W H E"]:
    """Attention of B windows over their pages; a row sees positions up to its own.

    One layer's pages of every request are gathered at a time, B * pages * P positions:
    the table's width bounds memory and work. Windows are attended W rows wide also
    where fewer are real: rows are cheap, the context is read once a request.
    """
    index = jnp.arange(table.shape[1] * keys.shape[2], dtype=jnp.int32)
    visible = index[None, None, None] <= positions[:, None, :, None]  # [B, 1, W, C]
    last = jnp.max(positions, axis=1)
    segment = (_gather(keys, table), _gather_until(values, table, last + 1), visible)
    return layers.grouped_attention(query[:, None], [segment])[:, 0]


def _attend(
    query: jax.Array, keys: jax.Array, values: jax.Array, place: attention.Place
) -> jax.Array:
    """Attention over pages by XLA, of windows or of packed rows."""
    table, layout = place.table, place.layout
    assert table is not None
    if layout is None:
        return attend_pages(query, keys, values, table, place.positions)
    query, positions = layout.unpack(query, 0), layout.unpack(place.positions, -1)
    return layout.pack(attend_pages(query, keys, values, table, positions), 0)


_gather = jax.jit(kernel_pages.gather)  # traced once for all layers


@jax.jit
def _gather_until(pages: jax.Array, table: jax.Array, end: jax.Array) -> jax.Array:
    """`_gather`, zero from position `end` on: a weight of 0 times NaN would be NaN."""
    gathered = _gather(pages, table)
    index = jnp.arange(gathered.shape[2], dtype=jnp.int32)
    is_known = index[None] < end[:, None]  # [B, C]
    return jnp.where(is_known[:, None, :, None], gathered, 0)


@jax.jit
def _scatter(
    pages: jax.Array, page: jax.Array, row: jax.Array, new: jax.Array
) -> jax.Array:
    rows = new.reshape(-1, *new.shape[-2:]).astype(pages.dtype)  # [T, G, E]
    return pages.at[page, :, row].set(rows, mode="drop")


def _full(table: jax.Array, pages: jax.Array) -> jax.Array:
    return jnp.full(table.shape[:1], table.shape[1] * pages.shape[2], jnp.int32)
