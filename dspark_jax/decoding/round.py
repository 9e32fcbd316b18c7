"""One speculative round: draft, window, verify, commit, observe.

Invariant. Let a be the anchor's position, the last known token, whose target state was
not computed. Between rounds both caches hold exactly positions 0 .. a-1. A round feeds
the anchor and l drafts to the target at a .. a+l; the committed ones stay, the rest is
stale and overwritten before it can be read.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dspark_jax import sampling
from dspark_jax.config import Speculation
from dspark_jax.decoding import commit, prefill, verify, windows
from dspark_jax.sampling import Sampling
from dspark_jax.types import (
    FINISH_STOP,
    DecodeState,
    Drafter,
    PyTree,
    RoundInfo,
    Stats,
    Target,
)


def speculative_step(
    state: DecodeState,
    *,
    target: Target,
    target_params: PyTree,
    drafter: Drafter,
    drafter_params: PyTree,
    settings: Sampling,
    options: Speculation,
    stop_tokens: Int[Array, "B n"],
    confidence_threshold: Float[Array, "B"] | None = None,
    confidence_temperatures: Float[Array, "K"] | None = None,
    max_verify_length: Int[Array, "B"] | None = None,
) -> tuple[DecodeState, RoundInfo]:
    """`speculative_round` with arguments already checked and broadcast."""
    length = options.draft_length or drafter.config.block_size
    anchor_at = state.lengths - 1
    anchor = jnp.take_along_axis(state.tokens, anchor_at[:, None], axis=1)[:, 0]
    sampler = sampling.make_draft_sampler(
        state.key,
        anchor_at,
        settings,
        draft_length=length,
        rule=options.rule,
        candidates=options.candidates,
    )
    draft, drafter_state = drafter.propose(
        drafter_params, target_params, state.drafter_state, anchor, anchor_at, sampler
    )
    confidence = windows.confidences(draft, confidence_temperatures)
    is_running = ~state.is_done
    window = windows.window_length(
        draft,
        confidence,
        state.limits - state.lengths,
        stop_tokens,
        keep=options.keep,
        threshold=confidence_threshold,
        max_verify_length=max_verify_length,
    )
    window = jnp.where(is_running, window, 0)

    # Verify: the anchor and the drafts of the window; other rows are padding.
    fed = jnp.concatenate([anchor[:, None], draft.tokens], axis=1)  # [B, W]
    offset = jnp.arange(length + 1, dtype=jnp.int32)[None]
    is_fed = (offset <= window[:, None]) & is_running[:, None]
    positions = jnp.where(is_fed, anchor_at[:, None] + offset, -1)
    hidden, taps, cache = target.forward(
        target_params,
        fed,
        positions,
        state.target_cache,
        tap_layers=drafter.config.tap_layers,
    )
    logits = target.unembed(target_params, hidden).astype(jnp.float32)
    rows = sampling.make_row(logits, jax.tree.map(lambda x: x[:, None], settings))
    verdict = verify.verify(
        state.key,
        anchor_at,
        draft,
        logits,
        rows,
        window,
        settings,
        rule=options.rule,
    )

    # New token w is draft w, or what follows the accepted ones, if anything does.
    new_tokens = jnp.concatenate([draft.tokens, draft.tokens[:, -1:]], axis=1)
    is_next = offset == verdict.num_accepted[:, None]
    new_tokens = jnp.where(is_next, verdict.next_token[:, None], new_tokens)
    state = state.replace(target_cache=cache)
    state, num_committed = commit.commit(
        state,
        new_tokens,
        verdict.num_accepted + verdict.is_finite.astype(jnp.int32),
        verdict.is_finite,
        stop_tokens,
        logits,
        rows,
        settings,
    )
    positions = jnp.where(
        offset < num_committed[:, None], anchor_at[:, None] + offset, -1
    )
    drafter_state = drafter.observe(drafter_params, drafter_state, fed, positions, taps)
    num_accepted = jnp.where(is_running, verdict.num_accepted, 0)
    stats = state.stats
    if stats is not None:
        is_counted = is_running & verdict.is_finite
        # A stop token among the accepted drafts leaves no room for the next token.
        ended = (state.finish == FINISH_STOP) & (num_committed <= num_accepted)
        stats = _add(stats, is_counted, window, num_accepted, ended)
    info = RoundInfo(
        draft=draft,
        confidence=confidence,
        verify_length=window,
        num_accepted=num_accepted,
        next_token=verdict.next_token,
        num_committed=num_committed,
    )
    return state.replace(drafter_state=drafter_state, stats=stats), info


def plain_step(
    state: DecodeState,
    *,
    target: Target,
    target_params: PyTree,
    settings: Sampling,
    stop_tokens: Int[Array, "B n"],
) -> DecodeState:
    """One token of plain decoding for every running sequence."""
    anchor_at = state.lengths - 1
    anchor = jnp.take_along_axis(state.tokens, anchor_at[:, None], axis=1)
    positions = jnp.where(state.is_done, -1, anchor_at)[:, None]
    hidden, _, cache = target.forward(
        target_params, anchor, positions, state.target_cache
    )
    state = state.replace(target_cache=cache)
    return prefill.draw_first(
        state, hidden[:, 0], stop_tokens, target, target_params, settings
    )


def _add(
    stats: Stats,
    is_counted: jax.Array,
    window: jax.Array,
    num_accepted: jax.Array,
    ended: jax.Array,
) -> Stats:
    slots = jnp.arange(stats.verified_at.shape[1], dtype=jnp.int32)[None]
    counted = is_counted.astype(jnp.int32)
    accepted = num_accepted + jnp.where(ended, 0, 1)

    def at_slots(length: jax.Array) -> jax.Array:
        return (slots < length[:, None]).astype(jnp.int32) * counted[:, None]

    return Stats(
        num_rounds=stats.num_rounds + counted,
        num_verified=stats.num_verified + counted * window,
        num_accepted=stats.num_accepted + counted * num_accepted,
        accepted_sum=stats.accepted_sum + counted * accepted,
        verified_at=stats.verified_at + at_slots(window),
        reached_at=stats.reached_at + at_slots(jnp.minimum(window, num_accepted + 1)),
        accepted_at=stats.accepted_at + at_slots(num_accepted),
    )
