"""Table models over paged caches: a bigram target and a drafter that is far from it.

Words carry everything; the caches are written and read as a real model's are, so that
the engine takes them. All tables are parameters: one program serves every world.
"""

import dataclasses

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
    tap_layers: tuple[int, ...] = (0,)
    target_fingerprint: str = ""


@flax.struct.dataclass
class DrafterTables:
    logits: jax.Array  # [K, V, V]: slot, last token, next
    confidence_logits: jax.Array  # [K, V]: slot, the token it looks at


def make_target(vocab_size):
    return Target(
        config=TableConfig(vocab_size),
        init_cache=_init_cache,
        forward=Bound(_forward, (vocab_size,)),
        unembed=_unembed,
        embed=_embed,
    )


def make_drafter(block_size):
    return Drafter(
        config=TableDrafterConfig(block_size),
        init_state=_init_cache,
        observe=_observe,
        propose=_propose,
    )


def _init_cache(batch, capacity):
    return kv_cache.DenseCache.create(1, batch, capacity, 1, 2, jnp.float32)


def _forward(vocab_size, params, tokens, positions, cache, *, tap_layers=()):
    rows = jnp.ones((*tokens.shape, 1, 2), jnp.float32)
    attended, cache = cache.attend(0, rows, rows, rows, positions)
    hidden = jax.nn.one_hot(tokens, vocab_size)
    # Attention over ones gives one: what it read was the request's own.
    hidden = hidden * attended[..., 0, :1]
    return hidden, hidden if tap_layers else None, cache


def _unembed(params, hidden):
    return jnp.matmul(hidden, params, precision=jax.lax.Precision.HIGHEST)


def _embed(params, ids):
    return jax.nn.one_hot(ids, params.shape[-1])


def _observe(params, state, tokens, positions, taps):
    rows = jnp.broadcast_to(taps[..., None, :1], (*tokens.shape, 1, 2))
    return state.write(0, rows, rows, positions)


def _propose(params, target_params, state, anchor, position, sampler):
    state.context(0)
    last, slots = anchor, []
    for slot in range(sampler.draft_length):
        logits = params.logits[slot][last]
        token, probability, row = sampler.draw(slot, logits, None)
        confidence = params.confidence_logits[slot][last]
        slots.append((token, probability, logits, row, confidence))
        last = token
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves, axis=1), *slots)
    tokens, probability, logits, row, confidence = stacked
    draft = Draft(
        tokens=tokens,
        probability=probability,
        logits=logits,
        ids=None,
        row=row,
        confidence_logits=confidence,
    )
    return draft, state
