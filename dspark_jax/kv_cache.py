"""Keys and values of past tokens: the only file that knows how they lie in memory.

A cache is a pytree with `attend(layer, query, key, value, positions)`, which writes the
new rows and lets every row see the positions up to its own. Nothing is ever erased:
rows beyond a sequence's end are stale, are overwritten before they can be read, and so
rolling back costs nothing.
"""

from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from dspark_jax import attention, layers


class DenseCache(flax.struct.PyTreeNode):
    """One row of `capacity` positions per request; index = position.

    Keys and values are [B, G, C, E] a layer (heads before positions: attention then
    needs no transposed copy on a CPU), in a tuple, so that a decode step updates them
    in place.
    """

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]
    implementation: str = flax.struct.field(pytree_node=False, default="auto")

    @classmethod
    def create(
        cls,
        num_layers: int,
        batch: int,
        capacity: int,
        num_kv_heads: int,
        head_width: int,
        dtype: jnp.dtype,
        implementation: str = "auto",
        spare: int = 0,
    ) -> "DenseCache":
        """An empty cache: zeros, so that masked rows never hold NaN.

        `implementation` is that of its attention (see `dspark_jax.attention`). A kernel
        needs room for a draft block at the end: `spare` positions more.
        """
        stored = attention.stored_capacity(capacity, implementation, dtype, spare)
        shape = (batch, num_kv_heads, stored, head_width)
        return cls(
            keys=tuple(jnp.zeros(shape, dtype) for _ in range(num_layers)),
            values=tuple(jnp.zeros(shape, dtype) for _ in range(num_layers)),
            implementation=implementation,
        )

    @property
    def capacity(self) -> int:
        return self.keys[0].shape[2]

    def write(
        self, layer: int, key: jax.Array, value: jax.Array, positions: jax.Array
    ) -> "DenseCache":
        """Stores rows [B, W, G, E] at positions [B, W]; position -1 writes nothing."""
        return self.replace(
            keys=_replace_at(
                self.keys, layer, _scatter(self.keys[layer], key, positions)
            ),
            values=_replace_at(
                self.values, layer, _scatter(self.values[layer], value, positions)
            ),
        )

    def attend(
        self,
        layer: int,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        positions: jax.Array,
    ) -> tuple[jax.Array, "DenseCache"]:
        """Writes the rows, then attends causally: a row sees positions up to its own.

        Args:
          layer: 0-based.
          query: [B, W, H, E]; key, value: [B, W, G, E].
          positions: int32 [B, W]; -1 = padding.

        Returns:
          Attention output [B, W, H, E] and the cache with the rows written.
        """
        cache = self.write(layer, key, value, positions)
        out = attention.attend(
            query,
            cache.keys[layer],
            cache.values[layer],
            attention.Place(positions),
            implementation=self.implementation,
            plain=_attend,
        )
        return out, cache

    def attend_block(
        self,
        layer: int,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        positions: jax.Array,
    ) -> tuple[jax.Array, "DenseCache"]:
        """Attention of a draft block: rows see what is before it, and one another.

        Args:
          layer: 0-based.
          query: [B, K, H, E]; key, value: [B, K, G, E].
          positions: int32 [B, K], consecutive.

        Returns:
          Attention output [B, K, H, E] and the cache. A kernel reads the block where
          it lies: the rows from the block's first position on are then overwritten.
        """
        first = positions[:, 0]
        name = attention.choose(
            self.implementation,
            query,
            self.keys[layer],
            rows=query.shape[1],
            table=None,
        )
        if name == "xla":
            return attend_apart(query, key, value, *self.context(layer), first), self
        end = jnp.minimum(first + query.shape[1], self.capacity)
        cache = self.write(layer, key, value, positions)
        out = attention.attend(
            query,
            cache.keys[layer],
            cache.values[layer],
            attention.Place(jnp.broadcast_to(end[:, None] - 1, positions.shape)),
            implementation=self.implementation,
            plain=_attend,
        )
        return out, cache

    def context(self, layer: int) -> tuple[jax.Array, jax.Array]:
        """Keys and values [B, G, C, E] of one layer, stale rows included."""
        return self.keys[layer], self.values[layer]


def attend_apart(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    first: jax.Array,
) -> jax.Array:
    """Attention of draft blocks [B, K, H, E] that the context [B, G, C, E] lacks.

    Rows see the context before `first` [B] and the block's own key and value.
    """
    index = jnp.arange(keys.shape[2], dtype=jnp.int32)
    visible = index[None, None] < first[:, None, None]  # [B, 1, C]
    segments = [
        (keys, values, visible[:, :, None]),
        (key[:, None], value[:, None], None),
    ]
    return layers.grouped_attention(query[:, None], segments)[:, 0]


def _attend(
    query: jax.Array, keys: jax.Array, values: jax.Array, place: attention.Place
) -> jax.Array:
    index = jnp.arange(keys.shape[2], dtype=jnp.int32)
    positions = place.positions[:, None, :, None]
    visible = index[None, None, None] <= positions  # [B, 1, W, C]
    segment = (keys, values, visible)
    return layers.grouped_attention(query[:, None], [segment])[:, 0]


def repeat_rows(
    cache: Any, make_cache: Callable[[int], Any], batch: int, count: int
) -> Any:
    """Every request's row `count` times, in place order [a, a, b, b]: any cache pytree.

    Args:
      cache: made by `make_cache(batch)`.
      make_cache: only its shapes are looked at: the axis of a leaf that grows with the
        batch is the request's. A leaf without one is shared and stays.

    Raises:
      ValueError: a leaf with two such axes.
    """

    def repeat(path: Any, leaf: jax.Array, small: Any, large: Any) -> jax.Array:
        sizes = zip(small.shape, large.shape, strict=True)
        axes = [axis for axis, (a, b) in enumerate(sizes) if a != b]
        if len(axes) > 1:
            raise ValueError(
                f"cache leaf {jax.tree_util.keystr(path)} must have one axis of "
                f"requests, but the axes {axes} grow with the batch"
            )
        return jnp.repeat(leaf, count, axis=axes[0]) if axes else leaf

    small = jax.eval_shape(lambda: make_cache(batch))
    large = jax.eval_shape(lambda: make_cache(batch + 1))
    return jax.tree_util.tree_map_with_path(repeat, cache, small, large)


@jax.jit  # traced once for all layers
def _scatter(stored: jax.Array, rows: jax.Array, positions: jax.Array) -> jax.Array:
    batch = positions.shape[0]
    # Out of bounds is dropped; -1 must be moved there, since it would wrap around.
    index = jnp.where(positions < 0, stored.shape[2], positions)
    request = jnp.broadcast_to(jnp.arange(batch, dtype=jnp.int32)[:, None], index.shape)
    return stored.at[request, :, index].set(
        rows.astype(stored.dtype), mode="drop", unique_indices=False
    )


def _replace_at(items: tuple, index: int, item: jax.Array) -> tuple:
    return (*items[:index], item, *items[index + 1 :])
