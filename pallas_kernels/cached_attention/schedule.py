"""Which worker reads which tiles of keys: equal shares of all tiles of the batch.

A unit is one tile of query rows and one kv head. With `max_parts` = 1 a worker takes
whole units and writes the output itself. Otherwise all tiles of all units stand in one
row, cut into equal shares (stream-K): every worker reads as much as any other, however
ragged the lengths are, and a unit that was cut is combined afterwards.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Schedule(NamedTuple):
    """Shares of P workers; plain arithmetic on the number of tiles."""

    first_unit: jax.Array  # int32 [P]
    num_units: jax.Array  # int32 [P]
    share: jax.Array  # int32 [1], tiles a worker
    unit_start: jax.Array  # int32 [N'], tiles before a run's first kv head
    num_parts: jax.Array  # int32 [N', G], workers that read a unit


def whole_units(num_tiles: jax.Array, num_kv_heads: int, workers: int) -> Schedule:
    """Worker p takes the units p, p + P, p + 2P, ..."""
    units = num_tiles.shape[0] * num_kv_heads
    index = jnp.arange(workers, dtype=jnp.int32)
    return Schedule(
        first_unit=index,
        num_units=(units - index + workers - 1) // workers,
        share=jnp.zeros((1,), jnp.int32),
        unit_start=jnp.zeros_like(num_tiles),
        num_parts=jnp.ones((num_tiles.shape[0], num_kv_heads), jnp.int32),
    )


def equal_shares(
    num_tiles: jax.Array, num_kv_heads: int, workers: int, max_parts: int
) -> Schedule:
    """Worker p takes the tiles [p * share, (p + 1) * share) of all.

    The share is large enough that no unit is cut into more than `max_parts`.
    """
    total = num_kv_heads * jnp.sum(num_tiles, dtype=jnp.int32)
    longest = jnp.max(num_tiles)
    share = jnp.maximum(-(-total // workers), -(-longest // (max_parts - 1)))
    after = jnp.cumsum(num_tiles, dtype=jnp.int32) * num_kv_heads  # [N']
    before = after - num_tiles * num_kv_heads
    start = jnp.minimum(jnp.arange(workers, dtype=jnp.int32) * share, total)
    end = jnp.minimum(start + share, total)

    def unit_of(tile: jax.Array) -> jax.Array:
        run = jnp.sum(after[None] <= tile[:, None], axis=1, dtype=jnp.int32)
        run = jnp.minimum(run, num_tiles.shape[0] - 1)
        return run * num_kv_heads + (tile - before[run]) // num_tiles[run]

    first_unit = unit_of(start)
    num_units = jnp.where(start < end, unit_of(end - 1) - first_unit + 1, 0)
    head = jnp.arange(num_kv_heads, dtype=jnp.int32)
    first = before[:, None] + head[None] * num_tiles[:, None]  # [N', G]
    last = first + num_tiles[:, None] - 1
    return Schedule(
        first_unit=first_unit,
        num_units=num_units,
        share=share[None],
        unit_start=before,
        num_parts=last // share - first // share + 1,
    )
