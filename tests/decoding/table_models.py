"""A table language model as a Target, and a Drafter with path-dependent tables.

Next-token logits depend on the last two tokens; the cache is the tokens themselves. All
tables are parameters, so that one program serves every world.
"""

import dataclasses
import functools

import flax.struct
import jax
import jax.numpy as jnp

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
    last, slots = anchor, []
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
    draft = Draft(
        tokens=stack(tokens),
        probability=stack(probability),
        logits=stack(logits),
        ids=None if ids[0] is None else stack(ids),
        row=jax.tree.map(lambda *x: stack(x), *row),
        confidence_logits=stack(confidence),
    )
    return draft, state
