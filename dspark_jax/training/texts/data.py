"""Training texts that the target writes itself, whole batches of rows on the device.

Every row is one conversation: a forced prefix (system turn, then a prompt or its
beginning), then turns sampled from the target until the row is full: nothing is padded
and every position costs one step of one loop. User turns are sampled at T = 1 with
top-p; answers at the row's own temperature. A row's phase decides what the next token
is: forced from the prefix, from one of two headers, or sampled.
"""

import dataclasses
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dspark_jax import layers, products
from dspark_jax.training import vocabulary
from dspark_jax.types import PyTree, Target

PREFIX, TO_ANSWER, TO_USER, USER, ANSWER = range(5)  # phases of a row
_MASKED = -1e30


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """How rows are written; static under jit.

    Attributes:
      length: S, tokens of a row.
      end_of_turn: token that ends every turn.
      to_answer, to_user: headers forced after a user turn's end and an answer's end.
      banned: tokens that are never sampled (other control tokens).
      user_top_p: top-p of sampled user turns, at T = 1.
      max_user: tokens after which a sampled user turn is ended by force.
      temperatures, shares: of the answers; a row draws one temperature.
    """

    length: int = 320
    end_of_turn: int = 2
    to_answer: tuple[int, ...]
    to_user: tuple[int, ...]
    banned: tuple[int, ...] = ()
    user_top_p: float = 0.95
    max_user: int = 96
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    shares: tuple[float, ...] = (0.2, 0.35, 0.45)

    def __post_init__(self):
        if len(self.temperatures) != len(self.shares):
            raise ValueError(
                "temperatures and shares must have one entry each, got "
                f"{len(self.temperatures)} and {len(self.shares)}"
            )
        if abs(sum(self.shares) - 1) > 1e-6:
            raise ValueError(f"shares must sum to 1, got {self.shares}")
        if not 0 < self.user_top_p <= 1:
            raise ValueError(f"user_top_p must lie in (0, 1], got {self.user_top_p}")


class Prefixes(flax.struct.PyTreeNode):
    """What every row starts with, after the tokens that all rows share."""

    tokens: jax.Array  # int32 [B, P], right-padded
    lengths: jax.Array  # int32 [B], >= 1
    is_complete: jax.Array  # bool [B]: an answer follows; False: a user turn goes on


class Rows(flax.struct.PyTreeNode):
    """Texts for training."""

    tokens: jax.Array  # int32 [B, S]
    loss_mask: jax.Array  # bool [B, S], answers, their end of turn included


class _Loop(NamedTuple):
    phase: jax.Array  # int32 [B], where the next token comes from
    taken: jax.Array  # int32 [B], tokens taken in this phase
    token: jax.Array  # int32 [B], the last token
    tokens: jax.Array  # int32 [S, B]
    loss_mask: jax.Array  # bool [S, B]
    cache: "LockstepCache"


def write_rows(
    key: jax.Array,
    shared: Int[Array, "P"],
    prefixes: Prefixes,
    target_params: PyTree,
    *,
    target: Target,
    config: DataConfig,
) -> Rows:
    """Lets the target write one batch of rows; the same key writes the same rows.

    Args:
      key: one typed key.
      shared: tokens that start every row (the system turn), run once for all of them.
      prefixes: what follows in each row.
    """
    batch = prefixes.lengths.shape[0]
    start = shared.shape[0]
    answer_key, key = jax.random.split(key)
    temperature = jax.random.choice(
        answer_key,
        jnp.asarray(config.temperatures, jnp.float32),
        (batch,),
        p=jnp.asarray(config.shares, jnp.float32),
    )
    head = vocabulary.head_matrix(target, target_params)
    cache = LockstepCache.create(target, config.length)
    positions = jnp.arange(start, dtype=jnp.int32)[None]
    _, _, cache = target.forward(target_params, shared[None], positions, cache)
    cache = jax.tree.map(lambda x: jnp.repeat(x, batch, axis=0), cache)
    tokens = jnp.zeros((config.length, batch), jnp.int32)
    tokens = tokens.at[:start].set(jnp.broadcast_to(shared[:, None], (start, batch)))
    tokens = tokens.at[start].set(prefixes.tokens[:, 0])
    is_short = prefixes.lengths <= 1
    after_prefix = jnp.where(prefixes.is_complete, ANSWER, USER)
    loop = _Loop(
        phase=jnp.where(is_short, after_prefix, PREFIX).astype(jnp.int32),
        taken=jnp.where(is_short, 0, 1).astype(jnp.int32),
        token=prefixes.tokens[:, 0],
        tokens=tokens,
        loss_mask=jnp.zeros((config.length, batch), jnp.bool_),
        cache=cache,
    )

    def step(position, loop):
        where = jnp.full((batch, 1), position, jnp.int32)
        hidden, _, cache = target.forward(
            target_params, loop.token[:, None], where, loop.cache
        )
        logits = _logits(hidden[:, 0], head, config.banned)
        is_answer = loop.phase == ANSWER
        drawn = sample_tokens(
            jax.random.fold_in(key, position),
            logits,
            jnp.where(is_answer, temperature, 1.0),
            jnp.where(is_answer, 1.0, config.user_top_p),
        )
        return _advance(loop, drawn, prefixes, position, config)._replace(cache=cache)

    loop = jax.lax.fori_loop(start, config.length - 1, step, loop)
    return Rows(tokens=loop.tokens.T, loss_mask=loop.loss_mask.T)


def sample_tokens(
    key: jax.Array,
    logits: Float[Array, "B V"],
    temperature: Float[Array, "B"],
    top_p: Float[Array, "B"],
) -> Int[Array, "B"]:
    """Draws one token a row by inverting the cumulative distribution in two levels.

    One uniform a row instead of V Gumbels, and a top-p cut found to 0.03 nats: cheap
    rather than exact, for training texts only (decoding samples by `sampling.py`).
    """
    batch, vocab_size = logits.shape
    largest = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    top = jnp.max(logits, axis=-1, keepdims=True)
    safe = jnp.where(temperature > 0, temperature, 1.0)
    scaled = (logits - top) / safe[:, None]
    mass = jnp.exp(scaled)
    cut = _top_p_cut(scaled, mass, top_p)
    mass = jnp.where(scaled >= cut[:, None], mass, 0.0)
    width = _block_width(vocab_size)
    blocks = mass.reshape(batch, vocab_size // width, width)
    outer = jnp.cumsum(jnp.sum(blocks, axis=-1), axis=-1)  # [B, blocks]
    aim = jax.random.uniform(key, (batch, 1), jnp.float32) * outer[:, -1:]
    block = _first_above(outer, aim)  # [B, 1]
    before = jnp.take_along_axis(outer, jnp.maximum(block - 1, 0), axis=1)
    before = jnp.where(block > 0, before, 0.0)
    inner = jnp.take_along_axis(blocks, block[..., None], axis=1)[:, 0]  # [B, width]
    inner = jnp.where(inner > 0, jnp.cumsum(inner, axis=-1), -1.0)
    # Rounding can leave the aim above the last sum: the block's last kept token then.
    largest_sum = jnp.max(inner, axis=-1, keepdims=True)
    within = _first_above(inner, jnp.minimum(aim - before, 0.9999999 * largest_sum))
    drawn = (block * width + within)[:, 0].astype(jnp.int32)
    return jnp.where(temperature > 0, drawn, largest)


class LockstepCache(flax.struct.PyTreeNode):
    """Dense keys and values of rows that are all at the same position.

    [B, G, S, E] a layer. Rows are written by one slice update instead of a scatter.
    """

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]

    @classmethod
    def create(cls, target: Target, capacity: int) -> "LockstepCache":
        """An empty cache of one row."""
        block = target.config.block
        shape = (1, block.num_kv_heads, capacity, block.head_width)
        dtype = layers.dtype_of(target.config.compute_dtype)
        zeros = tuple(jnp.zeros(shape, dtype) for _ in range(target.config.num_layers))
        return cls(keys=zeros, values=zeros)

    def attend(
        self,
        layer: int,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        positions: jax.Array,
    ) -> tuple[jax.Array, "LockstepCache"]:
        """Writes W rows from positions[0, 0] on; a row sees positions up to its own."""
        keys, values = list(self.keys), list(self.values)
        for stored, rows in ((keys, key), (values, value)):
            rows = jnp.swapaxes(rows, 1, 2).astype(stored[layer].dtype)
            stored[layer] = jax.lax.dynamic_update_slice_in_dim(
                stored[layer], rows, positions[0, 0], axis=2
            )
        index = jnp.arange(keys[layer].shape[2], dtype=jnp.int32)
        visible = index[None, None, None] <= positions[:1, None, :, None]
        segment = (keys[layer], values[layer], visible)  # [1, 1, W, S]
        out = layers.grouped_attention(query[:, None], [segment])[:, 0]
        return out, LockstepCache(keys=tuple(keys), values=tuple(values))


def _advance(
    loop: _Loop,
    drawn: jax.Array,
    prefixes: Prefixes,
    position: jax.Array,
    config: DataConfig,
) -> _Loop:
    """Chooses the token at position + 1 and moves every row's phase on."""
    phase, index = loop.phase, loop.taken
    last = prefixes.tokens.shape[1] - 1
    prefix = jnp.take_along_axis(
        prefixes.tokens, jnp.minimum(index, last)[:, None], axis=1
    )[:, 0]
    drawn = jnp.where(
        (phase == USER) & (index >= config.max_user), config.end_of_turn, drawn
    )
    token = jnp.where(phase == PREFIX, prefix, drawn)
    token = jnp.where(phase == TO_ANSWER, _header(config.to_answer, index), token)
    token = jnp.where(phase == TO_USER, _header(config.to_user, index), token)
    taken = index + 1
    ended = token == config.end_of_turn
    after_prefix = jnp.where(prefixes.is_complete, ANSWER, USER)
    moves = (  # phase, is it over after this token, the next one
        (PREFIX, taken >= prefixes.lengths, after_prefix),
        (TO_ANSWER, taken >= len(config.to_answer), ANSWER),
        (TO_USER, taken >= len(config.to_user), USER),
        (USER, ended, TO_ANSWER),
        (ANSWER, ended, TO_USER),
    )
    following = phase
    for name, is_over, after in moves:
        following = jnp.where((phase == name) & is_over, after, following)
    return loop._replace(
        phase=following.astype(jnp.int32),
        taken=jnp.where(following == phase, taken, 0).astype(jnp.int32),
        token=token,
        tokens=_set_row(loop.tokens, token, position + 1),
        loss_mask=_set_row(loop.loss_mask, phase == ANSWER, position + 1),
    )


def _header(tokens: tuple[int, ...], index: jax.Array) -> jax.Array:
    table = jnp.asarray(tokens, jnp.int32)
    return jnp.take(table, jnp.minimum(index, len(tokens) - 1), mode="clip")


def _set_row(table: jax.Array, row: jax.Array, index: Any) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(table, row[None], index, axis=0)


def _logits(hidden: jax.Array, head: jax.Array, banned: tuple[int, ...]) -> jax.Array:
    logits = products.contract(hidden, head.astype(hidden.dtype), (1,), (1,))
    if not banned:
        return logits
    is_banned = np.zeros(logits.shape[-1], np.bool_)
    is_banned[list(banned)] = True
    return jnp.where(jnp.asarray(is_banned)[None], _MASKED, logits)


def _top_p_cut(scaled: jax.Array, mass: jax.Array, top_p: jax.Array) -> jax.Array:
    """A cut c with mass(>= c) >= top_p, the largest one up to 0.03 nats."""
    wanted = top_p * jnp.sum(mass, axis=-1)
    low = jnp.full(top_p.shape, -16.0, jnp.float32)
    span = 16.0
    for _ in range(3):  # seven thresholds at a time: the sums share one read
        span = span / 8
        best = low
        for threshold in [low + span * i for i in range(1, 8)]:
            kept = jnp.sum(jnp.where(scaled >= threshold[:, None], mass, 0.0), axis=-1)
            best = jnp.where(kept >= wanted, threshold, best)
        low = best
    return jnp.where(top_p < 1, low, -jnp.inf)


def _first_above(sums: jax.Array, aim: jax.Array) -> jax.Array:
    """Index [B, 1] of the first entry above `aim`; the last one if there is none."""
    above = sums > aim
    last = sums.shape[-1] - 1
    index = jnp.argmax(above, axis=-1, keepdims=True).astype(jnp.int32)
    return jnp.where(jnp.any(above, axis=-1, keepdims=True), index, last)


def _block_width(vocab_size: int) -> int:
    """The largest power of two up to 256 that divides the vocabulary."""
    width = 1
    while width < 256 and vocab_size % (2 * width) == 0:
        width *= 2
    return width
