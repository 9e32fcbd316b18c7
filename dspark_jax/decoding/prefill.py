"""Prefill: feeds prompts (or a new turn) into both caches and draws the first token.

The prompt goes through in chunks up to the longest real length, not the padded one; one
row per request is unembedded.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from dspark_jax import kv_cache, noise, sampling
from dspark_jax.decoding import commit
from dspark_jax.sampling import Sampling
from dspark_jax.types import (
    RUNNING,
    DecodeState,
    Drafter,
    Logprobs,
    PyTree,
    Stats,
    Target,
)

DEFAULT_CHUNK = 128


def start(
    key: jax.Array,
    tokens: Int[Array, "B P"],
    lengths: Int[Array, "B"],
    limits: Int[Array, "B"],
    stop_tokens: Int[Array, "B n"],
    *,
    target: Target,
    target_params: PyTree,
    drafter: Drafter | None,
    drafter_params: PyTree,
    settings: Sampling,
    capacity: int,
    draft_length: int,
    num_samples: int,
    return_logprobs: bool,
    chunk: int = DEFAULT_CHUNK,
) -> DecodeState:
    """A fresh state after the prompts, with the first new token drawn.

    `key`, `limits`, `stop_tokens` and `settings` are per sample ([B * num_samples]);
    `tokens` and `lengths` per prompt. Each prompt is fed once.
    """
    batch = tokens.shape[0]
    rows = batch * num_samples
    cache = target.init_cache(batch, capacity)
    state = None if drafter is None else drafter.init_state(batch, capacity)
    hidden, cache, state = _feed(
        tokens.astype(jnp.int32),
        jnp.zeros((batch,), jnp.int32),
        lengths,
        cache,
        state,
        target=target,
        target_params=target_params,
        drafter=drafter,
        drafter_params=drafter_params,
        chunk=chunk,
    )
    buffer = jnp.zeros((batch, capacity), jnp.int32)
    buffer = jax.lax.dynamic_update_slice(buffer, tokens.astype(jnp.int32), (0, 0))
    if num_samples > 1:
        cache = kv_cache.repeat_rows(
            cache, lambda n: target.init_cache(n, capacity), batch, num_samples
        )
        if drafter is not None:
            make_state = drafter.init_state
            state = kv_cache.repeat_rows(
                state, lambda n: make_state(n, capacity), batch, num_samples
            )
        hidden, buffer, lengths = (
            jnp.repeat(x, num_samples, axis=0) for x in (hidden, buffer, lengths)
        )
    decode = DecodeState(
        key=jnp.copy(key),  # the caller's own keys must survive a donated state
        tokens=buffer,
        lengths=lengths,
        limits=limits,
        finish=jnp.full((rows,), RUNNING, jnp.int32),
        target_cache=cache,
        drafter_state=state,
        stats=None if drafter is None else empty_stats(lengths, draft_length),
        logprobs=_empty_logprobs(rows, capacity) if return_logprobs else None,
    )
    return draw_next(decode, hidden, stop_tokens, target, target_params, settings)


def continue_from(
    state: DecodeState,
    tokens: Int[Array, "B Q"],
    lengths: Int[Array, "B"],
    limits: Int[Array, "B"],
    stop_tokens: Int[Array, "B n"],
    *,
    target: Target,
    target_params: PyTree,
    drafter: Drafter | None,
    drafter_params: PyTree,
    settings: Sampling,
    chunk: int = DEFAULT_CHUNK,
) -> DecodeState:
    """Appends a new turn and draws the next token; only new tokens are fed.

    A row whose turn does not fit stays as it is and finishes by length.
    """
    last = min(state.tokens.shape[1], target.config.max_position)
    fits = state.lengths + lengths <= last
    lengths = jnp.where(fits, lengths, 0)
    limits = jnp.where(fits, limits, state.lengths)
    width = tokens.shape[1]
    offset = jnp.arange(width, dtype=jnp.int32)[None]
    is_new = offset < lengths[:, None]
    anchor, anchor_at = state.anchor
    fed = jnp.concatenate([anchor[:, None], tokens.astype(jnp.int32)], axis=1)
    hidden, cache, drafter_state = _feed(
        fed,
        anchor_at,
        jnp.where(fits, lengths + 1, 0),
        state.target_cache,
        state.drafter_state,
        target=target,
        target_params=target_params,
        drafter=drafter,
        drafter_params=drafter_params,
        chunk=chunk,
    )
    state = state.replace(
        tokens=commit.write_rows(
            state.tokens,
            tokens.astype(jnp.int32),
            jnp.where(is_new, state.lengths[:, None] + offset, -1),
        ),
        lengths=state.lengths + lengths,
        limits=limits,
        finish=jnp.full_like(state.finish, RUNNING),
        target_cache=cache,
        drafter_state=drafter_state,
    )
    return draw_next(state, hidden, stop_tokens, target, target_params, settings)


def draw_next(
    state: DecodeState,
    hidden: jax.Array,
    stop_tokens: jax.Array,
    target: Target,
    target_params: PyTree,
    settings: Sampling,
) -> DecodeState:
    """Draws and commits one token from `hidden` [B, D], as plain decoding does."""
    logits = target.unembed(target_params, hidden).astype(jnp.float32)
    is_finite = sampling.has_distribution(logits)
    row = sampling.make_row(logits, settings)
    gumbel = None
    if settings.temperature is not None:
        ids = jnp.broadcast_to(
            jnp.arange(logits.shape[-1], dtype=jnp.int32), logits.shape
        )
        gumbel = noise.token_gumbel(state.key, state.lengths, ids)
    token = sampling.draw(logits, row, settings.temperature, gumbel)
    rows = jax.tree.map(lambda x: x[:, None], row)
    return commit.commit(
        state,
        token[:, None],
        is_finite.astype(jnp.int32),
        is_finite,
        stop_tokens,
        logits[:, None],
        rows,
        settings,
    )[0]


def _feed(
    tokens: Int[Array, "B P"],
    first: Int[Array, "B"],
    counts: Int[Array, "B"],
    cache: PyTree,
    state: PyTree,
    *,
    target: Target,
    target_params: PyTree,
    drafter: Drafter | None,
    drafter_params: PyTree,
    chunk: int,
) -> tuple[jax.Array, PyTree, PyTree]:
    """Feeds tokens[b, :counts[b]] at positions first[b] on; the last row's hidden."""
    width = tokens.shape[1]
    chunk = min(chunk, width)
    num_chunks = -(-width // chunk)
    tokens = jnp.pad(tokens, ((0, 0), (0, num_chunks * chunk - width)))
    taps_of = () if drafter is None else drafter.config.tap_layers

    def feed_chunk(index: Any, last: Any, cache: Any, state: Any) -> Any:
        begin = index * chunk
        piece = jax.lax.dynamic_slice_in_dim(tokens, begin, chunk, axis=1)
        offset = begin + jnp.arange(chunk, dtype=jnp.int32)[None]
        is_real = offset < counts[:, None]
        positions = jnp.where(is_real, first[:, None] + offset, -1)
        hidden, taps, cache = target.forward(
            target_params, piece, positions, cache, tap_layers=taps_of
        )
        if drafter is not None:
            state = drafter.observe(drafter_params, state, piece, positions, taps)
        at = jnp.clip(counts - 1 - begin, 0, chunk - 1)
        row = jnp.take_along_axis(hidden, at[:, None, None], axis=1)[:, 0]
        is_last = (counts - 1 >= begin) & (counts - 1 < begin + chunk)
        if last is None:
            return row, cache, state
        return jnp.where(is_last[:, None], row, last), cache, state

    last, cache, state = feed_chunk(jnp.int32(0), None, cache, state)
    if num_chunks == 1:
        return last, cache, state
    needed = (jnp.max(counts) + chunk - 1) // chunk

    def body(carry: Any) -> Any:
        index, last, cache, state = carry
        return (index + 1, *feed_chunk(index, last, cache, state))

    carry = (jnp.int32(1), last, cache, state)
    carry = jax.lax.while_loop(lambda carry: carry[0] < needed, body, carry)
    return carry[1:]


def empty_stats(lengths: Int[Array, "B"], draft_length: int) -> Stats:
    """Counts of nothing, for requests whose lengths are [B]."""

    # Made of `lengths`, so that inside `shard_map` they vary over the mesh as the
    # counts that a loop adds to them do; each its own array, so that it can be donated.
    def zeros(*sizes: int) -> jax.Array:
        first = (lengths * 0).reshape(-1, *([1] * len(sizes)))
        return jnp.broadcast_to(first, (lengths.shape[0], *sizes))

    return Stats(
        num_rounds=zeros(),
        num_verified=zeros(),
        num_accepted=zeros(),
        accepted_sum=zeros(),
        verified_at=zeros(draft_length),
        reached_at=zeros(draft_length),
        accepted_at=zeros(draft_length),
    )


def _empty_logprobs(batch: int, capacity: int) -> Logprobs:
    zeros = jnp.zeros((batch, capacity), jnp.float32)
    return Logprobs(raw=zeros, sampling=zeros)
