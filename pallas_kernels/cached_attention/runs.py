"""The one form that both public functions bring their arguments to: runs of rows.

A run is one request's consecutive query rows. Rows of a run share the keys that they
read, so a kernel reads a key once for the whole run; which of them a row sees is a
number a row.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Runs(NamedTuple):
    """N runs over the rows of a packed query [T, H, E]."""

    first_row: jax.Array  # int32 [N]
    num_rows: jax.Array  # int32 [N], at most W
    slot: jax.Array  # int32 [N], the row of the cache or of the page table
    num_keys: jax.Array  # int32 [N, W]: row w sees the keys before it; 0 = none
    is_uniform: bool  # run n is the rows n*W .. (n+1)*W - 1
    is_identity: bool  # and run n reads slot n
    is_row: jax.Array | None = None  # bool [T]: is of a run; None = every one is


class Spans(NamedTuple):
    """Runs cut into tiles of rows, and the tiles of keys that each of them reads."""

    first_row: jax.Array  # int32 [N']
    num_rows: jax.Array  # int32 [N']
    slot: jax.Array  # int32 [N']
    limits: jax.Array  # int32 [N', rows]: keys that each row sees, 0 where no row is
    first_key: jax.Array  # int32 [N']: keys before it are seen by none
    end_key: jax.Array  # int32 [N']: nor are those from it on
    first_tile: jax.Array  # int32 [N']
    num_tiles: jax.Array  # int32 [N'], at least 1


def of_blocks(num_keys: jax.Array, slots: jax.Array | None, rows: int) -> Runs:
    """Requests of `rows` rows each, all of which see the same keys."""
    batch = num_keys.shape[0]
    index = jnp.arange(batch, dtype=jnp.int32)
    return Runs(
        first_row=index * rows,
        num_rows=jnp.full((batch,), rows, jnp.int32),
        slot=index if slots is None else slots,
        num_keys=jnp.broadcast_to(num_keys[:, None], (batch, rows)),
        is_uniform=True,
        is_identity=slots is None,
    )


def of_windows(num_keys: jax.Array) -> Runs:
    """Windows of W rows each; window n reads slot n. `num_keys` is int32 [N, W]."""
    blocks = of_blocks(num_keys[:, 0], None, num_keys.shape[1])
    return blocks._replace(num_keys=num_keys)


def of_packed(
    slots: jax.Array, num_keys: jax.Array, *, num_slots: int, max_rows: int
) -> Runs:
    """One run a slot, from the slot and the number of keys of every packed row."""
    total = slots.shape[0]
    is_row = (slots >= 0) & (num_keys > 0)
    index = jnp.arange(num_slots, dtype=jnp.int32)
    member = is_row[None] & (slots[None] == index[:, None])  # [N, T]
    num_rows = jnp.sum(member, axis=1, dtype=jnp.int32)
    first_row = jnp.argmax(member, axis=1).astype(jnp.int32)
    offset = jnp.arange(max_rows, dtype=jnp.int32)
    row = jnp.minimum(first_row[:, None] + offset[None], total - 1)  # [N, W]
    seen = jnp.where(offset[None] < num_rows[:, None], num_keys[row], 0)
    return Runs(
        first_row,
        num_rows,
        index,
        seen,
        is_uniform=False,
        is_identity=True,
        is_row=jnp.any(member, axis=0),
    )


def spans(
    runs: Runs, *, rows: int, rows_per_token: int, key_tile: int, window: int | None
) -> Spans:
    """Cuts runs into tiles of at most `rows` rows of the folded query.

    Args:
      rows: folded rows a tile; a run's row takes `rows_per_token` of them.
      window: a row sees its last `window` keys only.
    """
    count, width = runs.num_keys.shape
    tokens = rows // rows_per_token
    tiles = -(-width // tokens)
    padded = jnp.pad(runs.num_keys, ((0, 0), (0, tiles * tokens - width)))
    seen = padded.reshape(count * tiles, tokens)
    start = jnp.arange(tiles, dtype=jnp.int32) * tokens
    first_row = (runs.first_row[:, None] + start[None]).reshape(-1)
    num_rows = jnp.clip(runs.num_rows[:, None] - start[None], 0, tokens).reshape(-1)
    end = jnp.max(seen, axis=1)
    first = jnp.zeros_like(end)
    if window is not None:
        least = jnp.min(jnp.where(seen > 0, seen, jnp.int32(2**31 - 1)), axis=1)
        first = jnp.where(end > 0, jnp.maximum(least - window, 0), 0)
    first_tile = first // key_tile
    limits = jnp.repeat(seen, rows_per_token, axis=1)
    return Spans(
        first_row=first_row,
        num_rows=num_rows,
        slot=jnp.repeat(jnp.maximum(runs.slot, 0), tiles),
        limits=jnp.pad(limits, ((0, 0), (0, rows - limits.shape[1]))),
        first_key=first,
        end_key=end,
        first_tile=first_tile,
        num_tiles=jnp.maximum(-(-end // key_tile) - first_tile, 1),
    )


def fold(query: jax.Array, spans: Spans, kv_heads: int) -> jax.Array:
    """Rows of every tile, query heads of one kv head side by side: [N', G, rows, E]."""
    total, heads, width = query.shape
    group, rows = heads // kv_heads, spans.limits.shape[1]
    tokens = rows // group
    row = spans.first_row[:, None] + jnp.arange(tokens, dtype=jnp.int32)[None]
    found = query[jnp.minimum(row, total - 1)]  # [N', tokens, H, E]
    found = found.reshape(-1, tokens, kv_heads, group, width).swapaxes(1, 2)
    found = found.reshape(-1, kv_heads, tokens * group, width)
    spare = rows - tokens * group
    return jnp.pad(found, ((0, 0), (0, 0), (0, spare), (0, 0)))


def unfold(folded: jax.Array, spans: Spans, total: int, heads: int) -> jax.Array:
    """The inverse of `fold`: [T, H, E]; rows of no tile hold anything."""
    _, kv_heads, rows, width = folded.shape
    group = heads // kv_heads
    tokens = rows // group
    tile, local = place(spans, total, tokens)
    parts = folded[:, :, : tokens * group].reshape(-1, kv_heads, tokens, group, width)
    return parts[tile, :, local].reshape(total, heads, width)


def place(spans: Spans, total: int, tokens: int) -> tuple[jax.Array, jax.Array]:
    """The tile [T] that holds each packed row, and the row's number in it [T]."""
    row = jnp.arange(total, dtype=jnp.int32)
    offset = row[None] - spans.first_row[:, None]  # [N', T]
    inside = (offset >= 0) & (offset < spans.num_rows[:, None])
    tile = jnp.argmax(inside, axis=0).astype(jnp.int32)
    return tile, jnp.clip(row - spans.first_row[tile], 0, tokens - 1)
