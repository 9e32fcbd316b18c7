"""Targets and drafters that are tables, so that the law of their words is known.

Two targets: one whose logits depend on the last two tokens and whose cache is the
tokens themselves; and a bigram over real caches, which the engine takes. The drafters'
tables depend on the last two tokens, drafted ones included. All tables are parameters:
one program serves every world.
"""

import dataclasses
import functools

import flax.struct
import jax
import jax.numpy as jnp

from dspark_jax import kv_cache
from dspark_jax.types import Bound, Draft, Drafter, Target


@dataclasses.dataclass(frozen=True)
class TableConfig:
    vocab_size: int
    max_position: int = 64
    num_layers: int = 1
    stop_tokens: tuple[int, ...] = ()
    fingerprint: str = ""

    @property
    def width(self):
        return self.vocab_size


@dataclasses.dataclass(frozen=True)
class TableDrafterConfig:
    block_size: int
    tap_layers: tuple[int, ...] = ()
    target_fingerprint: str = ""


@flax.struct.dataclass
class DrafterTables:
    """q and confidence of slot k after the last two tokens, drafted ones included."""

    logits: jax.Array  # [K, V, V, V]: slot, last but one, last, next
    confidence_logits: jax.Array  # [K, V]: slot, the token it looks at
    # 0: slot k's confidence looks at x_{k-1}, as it must; 1: at x_k, an anticipation.
    look_ahead: jax.Array  # int32 []


def make_target(vocab_size, max_position=64):
    """Parameters are logits [V, V, V]: last but one, last, next."""
    return Target(
        config=TableConfig(vocab_size, max_position),
        init_cache=_init_cache,
        forward=_forward,
        unembed=_unembed,
        embed=_embed,
    )


def make_drafter(vocab_size, block_size):
    return Drafter(
        config=TableDrafterConfig(block_size),
        init_state=_init_cache,
        observe=_observe,
        propose=Bound(_propose, (vocab_size,)),
    )


def make_attending_target(vocab_size):
    """Parameters are logits [V, V]: last, next. What it attends to is all ones."""
    return Target(
        config=TableConfig(vocab_size),
        init_cache=_init_dense_cache,
        forward=Bound(_attending_forward, (vocab_size,)),
        unembed=_attending_unembed,
        embed=_embed,
    )


def make_attending_drafter(vocab_size, block_size):
    """It does not know the token before the anchor, and takes 0 for it."""
    return Drafter(
        config=TableDrafterConfig(block_size, tap_layers=(0,)),
        init_state=_init_dense_cache,
        observe=_attending_observe,
        propose=Bound(_attending_propose, (vocab_size,)),
    )


def _init_cache(batch, capacity):
    return jnp.zeros((batch, capacity), jnp.int32)


def _write(cache, tokens, positions):
    request = jnp.arange(cache.shape[0], dtype=jnp.int32)[:, None]
    index = jnp.where(positions < 0, cache.shape[1], positions)
    return cache.at[request, index].set(tokens, mode="drop")


def _forward(params, tokens, positions, cache, *, tap_layers=()):
    assert tap_layers == ()
    cache = _write(cache, tokens, positions)
    at = jnp.maximum(positions, 0)
    last = jnp.take_along_axis(cache, at, axis=1)
    before = jnp.take_along_axis(cache, jnp.maximum(at - 1, 0), axis=1)
    return params[before, last], None, cache


def _unembed(params, hidden):
    return hidden


def _embed(params, ids):
    return jax.nn.one_hot(ids, params.shape[-1])


def _observe(params, state, tokens, positions, taps):
    assert taps is None
    return _write(state, tokens, positions)


def _propose(vocab_size, params, target_params, state, anchor, position, sampler):
    before = jnp.maximum(position - 1, 0)[:, None]
    before = jnp.take_along_axis(state, before, axis=1)[:, 0]
    return _draw(vocab_size, params, before, anchor, sampler), state


def _init_dense_cache(batch, capacity):
    return kv_cache.DenseCache.create(1, batch, capacity, 1, 2, jnp.float32)


def _attending_forward(vocab_size, params, tokens, positions, cache, *, tap_layers=()):
    rows = jnp.ones((*tokens.shape, 1, 2), jnp.float32)
    attended, cache = cache.attend(0, rows, rows, rows, positions)
    hidden = jax.nn.one_hot(tokens, vocab_size)
    # Attention over ones gives one: what it read was the request's own.
    hidden = hidden * attended[..., 0, :1]
    return hidden, hidden if tap_layers else None, cache


def _attending_unembed(params, hidden):
    return jnp.matmul(hidden, params, precision=jax.lax.Precision.HIGHEST)


def _attending_observe(params, state, tokens, positions, taps):
    rows = jnp.broadcast_to(taps[..., None, :1], (*tokens.shape, 1, 2))
    return state.write(0, rows, rows, positions)


def _attending_propose(
    vocab_size, params, target_params, state, anchor, position, sampler
):
    state.context(0)
    before = jnp.zeros_like(anchor)
    return _draw(vocab_size, params, before, anchor, sampler), state


def _draw(vocab_size, params, before, last, sampler):
    slots = []
    for slot in range(sampler.draft_length):
        logits, ids = params.logits[slot][before, last], None
        if sampler.candidates is not None:
            logits, ids = jax.lax.top_k(logits, min(sampler.candidates, vocab_size))
        token, probability, row = sampler.draw(slot, logits, ids)
        seen = jnp.where(params.look_ahead == 1, token, last)
        confidence = params.confidence_logits[slot][seen]
        slots.append((token, probability, logits, ids, row, confidence))
        before, last = last, token
    stack = functools.partial(jnp.stack, axis=1)
    tokens, probability, logits, ids, row, confidence = zip(*slots, strict=True)
    return Draft(
        tokens=stack(tokens),
        probability=stack(probability),
        logits=stack(logits),
        ids=None if ids[0] is None else stack(ids),
        row=jax.tree.map(lambda *x: stack(x), *row),
        confidence_logits=stack(confidence),
    )
