"""One speculative round: draft, window, verify, commit, observe.

Invariant. Let a be the anchor's position, the last known token, whose target state was
not computed. Between rounds both caches hold exactly positions 0 .. a-1. A round feeds
the anchor and l drafts to the target at a .. a+l; the committed ones stay, the rest is
stale and overwritten before it can be read.

Over paged caches (`paged_cache`) the rows of all windows may be packed into fewer than
B * W: the same round, with a layout that says whose each row is.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dspark_jax import draft_sampler, paged_cache, sampling
from dspark_jax.config import Speculation
from dspark_jax.decoding import commit, prefill, verify, windows
from dspark_jax.paged_cache import RowLayout
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
    budget: Int[Array, ""] | None = None,
    num_rows: int | None = None,
    caps_commit: bool = False,
) -> tuple[DecodeState, RoundInfo]:
    """`speculative_round` with arguments already checked and broadcast.

    Args:
      budget: drafts that may be verified, of all requests together; decided before this
        round drafts. The likeliest to be accepted are chosen now.
      num_rows: static, T: the target is fed T packed rows (its cache, and the
        drafter's, are paged views) instead of [B, W]. Windows must fit into T.
      caps_commit: static; the budget limits what is committed, not what is verified:
        the words are the same, and what the budget cost can be seen.
    """
    length = options.draft_length or drafter.config.block_size
    anchor, anchor_at = state.anchor
    sampler = draft_sampler.make_draft_sampler(
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
    allowed = None
    if budget is not None:
        allowed = _allocate(window, confidence, budget)
        window = window if caps_commit else allowed

    # Verify: the anchor and the drafts of the window; other rows are padding.
    fed = jnp.concatenate([anchor[:, None], draft.tokens], axis=1)  # [B, W]
    offset = jnp.arange(length + 1, dtype=jnp.int32)[None]
    is_fed = (offset <= window[:, None]) & is_running[:, None]
    positions = jnp.where(is_fed, anchor_at[:, None] + offset, -1)
    layout, cache = None, state.target_cache
    if num_rows is not None:
        counts = jnp.where(is_running, window + 1, 0)
        layout = paged_cache.make_layout(counts, num_rows, length + 1)
        cache = cache.replace(layout=layout)
    hidden, taps, cache = target.forward(
        target_params,
        _packed(fed, layout, 0),
        _packed(positions, layout, -1),
        cache,
        tap_layers=drafter.config.tap_layers,
    )
    of_rows = jax.tree.map(lambda x: x[:, None], settings)
    if layout is not None:
        hidden, cache = hidden[0], cache.replace(layout=None)  # [T, D]
        request = jnp.minimum(layout.request, fed.shape[0] - 1)
        of_rows = jax.tree.map(lambda x: x[request], settings)
    logits = target.unembed(target_params, hidden).astype(jnp.float32)
    rows = sampling.make_row(logits, of_rows)
    verdict = verify.verify(
        state.key,
        anchor_at,
        draft,
        logits,
        rows,
        window,
        settings,
        rule=options.rule,
        commit_length=allowed if caps_commit else None,
        layout=layout,
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
    if layout is not None:
        drafter_state = drafter_state.replace(layout=layout)
    drafter_state = drafter.observe(
        drafter_params,
        drafter_state,
        _packed(fed, layout, 0),
        _packed(positions, layout, -1),
        taps,
    )
    if layout is not None:
        drafter_state = drafter_state.replace(layout=None)
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
        commit_length=allowed if caps_commit and allowed is not None else window,
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
    return tapped_step(
        state,
        target=target,
        target_params=target_params,
        settings=settings,
        stop_tokens=stop_tokens,
        tap_layers=(),
    )[0]


def tapped_step(
    state: DecodeState,
    *,
    target: Target,
    target_params: PyTree,
    settings: Sampling,
    stop_tokens: Int[Array, "B n"],
    tap_layers: tuple[int, ...],
) -> tuple[DecodeState, Float[Array, "B MD"] | None]:
    """`plain_step`, and the taps of the anchors that it fed.

    A drafter's context lacks these tokens: `observe` must see them, here or later,
    before the drafter is asked again.
    """
    anchor, anchor_at = state.anchor
    hidden, taps, cache = target.forward(
        target_params,
        anchor[:, None],
        jnp.where(state.is_done, -1, anchor_at)[:, None],
        state.target_cache,
        tap_layers=tap_layers,
    )
    state = prefill.draw_next(
        state.replace(target_cache=cache),
        hidden[:, 0],
        stop_tokens,
        target,
        target_params,
        settings,
    )
    return state, None if taps is None else taps[:, 0]


def _allocate(
    window: Int[Array, "B"], confidence: Float[Array, "B K"] | None, budget: jax.Array
) -> Int[Array, "B"]:
    """The windows' likeliest slots, `budget` of all requests together."""
    assert confidence is not None  # the engine refuses a drafter without a head
    slots = jnp.arange(confidence.shape[1], dtype=jnp.int32)[None]
    survival = jnp.cumprod(confidence, axis=1)
    # Slots that cannot be committed must not use up the budget.
    survival = jnp.where(slots < window[:, None], survival, 0.0)
    return jnp.minimum(windows.allocate(survival, budget), window)


def _packed(dense: jax.Array, layout: RowLayout | None, fill: int) -> jax.Array:
    """Rows [B, W] as they are, or packed as [1, T]."""
    return dense if layout is None else layout.pack(dense, fill)[None]


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
