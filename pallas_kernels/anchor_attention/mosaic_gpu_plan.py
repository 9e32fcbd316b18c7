"""Which rows and keys a tile of `mosaic_gpu` holds: blocks sorted by their context.

A tile is 64 rows: a few whole blocks, and of each block the query heads of one kv head,
every head's slots padded to a power of two (a copy then fills whole rows of eight).
Blocks are sorted by the number of keys they see, so that a tile's rows see nearly the
same keys, and so that those who see a key are the last tiles.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

ROWS = 64  # of a wgmma


class Shape(NamedTuple):
    """What the kernels are compiled for, beside their settings."""

    batch: int
    anchors: int
    slots: int  # K
    kv_heads: int  # G
    group: int  # query heads a kv head
    width: int  # E
    length: int  # S, a multiple of 8
    tiles: int  # of a sequence, an even number

    @property
    def slot_rows(self) -> int:
        """Rows that a head's slots take."""
        return padded_slots(self.slots)

    @property
    def blocks(self) -> int:
        """Whole blocks a tile has."""
        return ROWS // (self.group * self.slot_rows)


class Plan(NamedTuple):
    """Tables of int32, for every tile of every sequence."""

    blocks: jax.Array  # [B * tiles, blocks], in [B * A]; -1 = no such block
    limits: jax.Array  # [B * tiles, 64], keys of the context that a row sees
    row_blocks: jax.Array  # [B * tiles, 64], the row's block in the tile; -1 = no row
    key_blocks: jax.Array  # [B * tiles, 64], the own key's block; -2 = nobody sees it
    low: jax.Array  # [B, tiles], keys that all rows see
    high: jax.Array  # [B, tiles], keys that some row sees


def padded_slots(slots: int) -> int:
    """The power of two, at least 8, that holds the slots."""
    return max(1 << (slots - 1).bit_length(), 8)


def make(
    num_context: jax.Array, present: jax.Array, kept: jax.Array, *, shape: Shape
) -> Plan:
    """The tables for int32 [B, A], bool [B, A, K] and bool [B, A]."""
    total = shape.tiles * shape.blocks
    more = total - shape.anchors

    def pad(array: jax.Array) -> jax.Array:
        return jnp.pad(array, [(0, 0), (0, more)] + [(0, 0)] * (array.ndim - 2))

    kept = pad(kept)  # False: blocks that only fill the last tile
    context = jnp.where(kept, pad(jnp.clip(num_context, 0, shape.length)), 0)
    order = jnp.argsort(jnp.where(kept, context, -1), axis=1, stable=True)
    order = order.astype(jnp.int32)
    context, kept = (jnp.take_along_axis(x, order, axis=1) for x in (context, kept))
    present = jnp.take_along_axis(pad(present), order[..., None], axis=1)
    sequence = jnp.arange(shape.batch, dtype=jnp.int32)[:, None]
    blocks = jnp.where(order < shape.anchors, sequence * shape.anchors + order, -1)

    def split(array: jax.Array) -> jax.Array:  # [B, total, ...] -> [B, tiles, blocks]
        return array.reshape(shape.batch, shape.tiles, shape.blocks, *array.shape[2:])

    context, kept, present = split(context), split(kept), split(present)
    number = jnp.arange(shape.blocks, dtype=jnp.int32)[None, None, :, None]
    slots = [(0, 0)] * 3 + [(0, shape.slot_rows - shape.slots)]

    def rows(array: jax.Array, fill: int) -> jax.Array:
        """[B, tiles, blocks, slot rows] for every head, to [B * tiles, 64]."""
        heads = (*array.shape[:3], shape.group, shape.slot_rows)
        array = jnp.broadcast_to(array[:, :, :, None], heads)
        return _fill(array, fill, shape)

    is_slot = jnp.arange(shape.slot_rows, dtype=jnp.int32) < shape.slots
    is_row = kept[..., None] & is_slot[None, None, None]
    limits = jnp.broadcast_to(context[..., None], is_row.shape)
    seen = kept[..., None] & jnp.pad(present, slots)
    return Plan(
        blocks=blocks.reshape(-1, shape.blocks),
        limits=rows(limits, 0),
        row_blocks=rows(jnp.where(is_row, number, -1), -1),
        key_blocks=_fill(jnp.where(seen, number, -2), -2, shape),
        low=_least(context, kept),
        high=jnp.max(context, axis=2),
    )


def seeing(plan: Plan, *, key_tile: int, length: int) -> tuple[jax.Array, jax.Array]:
    """Where the tiles of rows begin that see a tile of keys.

    Args:
      plan: tables.
      key_tile: keys a tile.
      length: S.

    Returns:
      For every tile of keys, int32 [B * key tiles]: the first tile of rows that sees
      some of its keys, and the first from which on all rows see all of them.
    """
    start = jnp.arange(0, length, key_tile, dtype=jnp.int32)[None, :, None]
    first = jnp.sum(plan.high[:, None] <= start, axis=2, dtype=jnp.int32)
    full = jnp.sum(plan.low[:, None] < start + key_tile, axis=2, dtype=jnp.int32)
    return first.reshape(-1), full.reshape(-1)


def _least(context: jax.Array, kept: jax.Array) -> jax.Array:
    # Dropped blocks come first: a tile without any other has 0, so that this ascends.
    least = jnp.min(jnp.where(kept, context, jnp.int32(2**30)), axis=2)
    return jnp.where(jnp.any(kept, axis=2), least, 0)


def _fill(array: jax.Array, fill: int, shape: Shape) -> jax.Array:
    array = array.reshape(shape.batch * shape.tiles, -1)
    more = ROWS - array.shape[1]
    return jnp.pad(array, ((0, 0), (0, more)), constant_values=fill)
