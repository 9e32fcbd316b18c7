"""The step programs: prefill a chunk, a plain round, a speculative round, catch up.

Each takes the state of all slots (donated), one int32 array of what the host decided
(slots, page tables), and gives the state and one int32 array of what happened. The
rounds are decoding's own, over paged views of the rows that take part. Rows without a
slot are padding: they write nothing, and what they say is not read.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dspark_jax import paged_cache
from dspark_jax.decoding import prefill, round
from dspark_jax.paged_cache import PagePool
from dspark_jax.serving import slot_state
from dspark_jax.serving.slot_state import KnownTokens, SlotState
from dspark_jax.serving.step_spec import Params, StepSpec
from dspark_jax.types import RUNNING, DecodeState, PyTree


@functools.partial(
    jax.jit, static_argnames=("spec", "num_rows"), donate_argnames="slots"
)
def speculative_rounds(
    params: Params,
    slots: SlotState,
    control: Int[Array, "B columns"],
    *,
    spec: StepSpec,
    num_rows: int,
) -> tuple[SlotState, Int[Array, "n B columns_out"]]:
    """Drafts, verifies `num_rows` packed rows and commits; `slots` is donated."""
    drafter = spec.drafter
    assert drafter is not None
    slot = spec.round_control.one(control, "slot")
    budget = spec.round_control.one(control, "num_drafts")[0]  # the same in every row
    width = spec.draft_length + 1
    decode, settings, stop_tokens = slot_state.rows_of(
        slots, slot, spec.round_control.of(control, "table")
    )
    is_packed = num_rows < slot.shape[0] * width

    def one_round(decode: DecodeState, _: Any) -> tuple[DecodeState, jax.Array]:
        before = decode.lengths
        context = decode.drafter_state.replace(num_keys=before - 1)
        decode, info = round.speculative_step(
            decode.replace(drafter_state=context),
            target=spec.target,
            target_params=params.target,
            drafter=drafter,
            drafter_params=params.drafter,
            settings=settings,
            options=spec.options,
            stop_tokens=stop_tokens,
            confidence_temperatures=params.temperatures,
            budget=budget if spec.is_budgeted else None,
            num_rows=num_rows if is_packed else None,
            caps_commit=spec.caps_commit,
        )
        confidence = info.confidence
        if confidence is None:
            confidence = jnp.ones(info.draft.tokens.shape, jnp.float32)
        return decode, spec.round_result.join(
            num_committed=info.num_committed,
            finish=decode.finish,
            verify_length=info.verify_length,
            commit_length=info.commit_length,
            num_accepted=info.num_accepted,
            tokens=_tokens_from(decode, before, width),
            confidence=confidence,
        )

    decode, result = _repeat(one_round, decode, spec.num_rounds)
    return slot_state.store(slots, slot, decode), result


@functools.partial(
    jax.jit, static_argnames="spec", donate_argnames=("slots", "deferred")
)
def plain_rounds(
    params: Params,
    slots: SlotState,
    deferred: Float[Array, "slots depth MD"] | None,
    control: Int[Array, "B columns"],
    *,
    spec: StepSpec,
) -> tuple[
    SlotState, Float[Array, "slots depth MD"] | None, Int[Array, "n B columns_out"]
]:
    """One token a request without drafting; `slots` and `deferred` are donated.

    Where there is a drafter, its context is left behind: `deferred` keeps what it must
    see of these tokens, for `catch_up`.
    """
    slot = spec.round_control.one(control, "slot")
    decode, settings, stop_tokens = slot_state.rows_of(
        slots, slot, spec.round_control.of(control, "table")
    )
    tap_layers = () if spec.drafter is None else spec.drafter.config.tap_layers

    def one_round(carry: Any, _: Any) -> tuple[Any, jax.Array]:
        decode, deferred = carry
        before, is_running = decode.lengths, ~decode.is_done
        decode, taps = round.tapped_step(
            decode,
            target=spec.target,
            target_params=params.target,
            settings=settings,
            stop_tokens=stop_tokens,
            tap_layers=tap_layers,
        )
        if taps is not None:
            assert deferred is not None
            row = jnp.where(is_running, slot, deferred.shape[0])
            place = (before - 1) % deferred.shape[1]
            deferred = deferred.at[row, place].set(taps, mode="drop")
        return (decode, deferred), spec.plain_result.join(
            num_committed=decode.lengths - before,
            finish=decode.finish,
            tokens=_tokens_from(decode, before, 1),
        )

    carry, result = _repeat(one_round, (decode, deferred), spec.num_rounds)
    decode, deferred = carry
    return slot_state.store(slots, slot, decode), deferred, result


@functools.partial(
    jax.jit, static_argnames=("spec", "num_rows"), donate_argnames="draft_pool"
)
def catch_up(
    drafter_params: PyTree,
    draft_pool: PagePool,
    known: KnownTokens,
    deferred: Float[Array, "slots depth MD"],
    control: Int[Array, "slots columns"],
    *,
    spec: StepSpec,
    num_rows: int,
) -> PagePool:
    """Shows the drafter the last tokens that plain rounds fed; the pool is donated.

    Those of all requests, `num_rows` at most, are packed. What has ended is left out:
    nothing is drafted for it any more. It takes only the parts of the state that it
    needs: to hand over all of them costs the host more than this costs the device.
    """
    drafter = spec.drafter
    assert drafter is not None
    columns = spec.catch_up_control
    num_slots, depth = deferred.shape[:2]
    slot = columns.one(control, "slot")
    at = jnp.minimum(slot, num_slots - 1)
    is_running = (slot < num_slots) & (known.finish[at] == RUNNING)
    counts = jnp.where(is_running, columns.one(control, "count"), 0)
    # The anchor is the last known token; it was fed by no round yet.
    first = known.lengths[at] - 1 - counts
    layout = paged_cache.make_layout(counts, num_rows, depth)
    request = jnp.minimum(layout.request, slot.shape[0] - 1)
    is_real = layout.request < slot.shape[0]
    positions = jnp.where(is_real, first[request] + layout.offset, -1)
    row = at[request]
    context = draft_pool.view(columns.of(control, "table")).replace(layout=layout)
    context = drafter.observe(
        drafter_params,
        context,
        known.tokens[row, positions][None],
        positions[None],
        deferred[row, positions % depth][None] if drafter.config.tap_layers else None,
    )
    return context.pool


@functools.partial(jax.jit, static_argnames="spec", donate_argnames="slots")
def prefill_chunk(
    params: Params,
    slots: SlotState,
    control: Int[Array, "pieces columns"],
    *,
    spec: StepSpec,
) -> tuple[SlotState, Int[Array, "1 pieces columns_out"]]:
    """Feeds a piece of a prompt per row and draws where one ends; `slots` is donated.

    Rows may be consecutive pieces of one request: all are written before any attends.
    """
    columns = spec.prefill_control
    slot = columns.one(control, "slot")
    slots = slot_state.admit(spec, slots, control, slot)
    tokens, table = columns.of(control, "tokens"), columns.of(control, "table")
    count = columns.one(control, "count")
    offset = jnp.arange(spec.chunk, dtype=jnp.int32)[None]
    positions = columns.one(control, "first")[:, None] + offset
    positions = jnp.where(offset < count[:, None], positions, -1)
    drafter = spec.drafter
    hidden, taps, cache = spec.target.forward(
        params.target,
        tokens,
        positions,
        slots.target_pool.view(table),
        tap_layers=() if drafter is None else drafter.config.tap_layers,
    )
    slots = slots.replace(target_pool=cache.pool)
    if drafter is not None and slots.draft_pool is not None:
        context = drafter.observe(
            params.drafter, slots.draft_pool.view(table), tokens, positions, taps
        )
        slots = slots.replace(draft_pool=context.pool)
    last = jnp.maximum(count - 1, 0)[:, None, None]
    last_hidden = jnp.take_along_axis(hidden, last, axis=1)[:, 0]  # [pieces, D]
    draws = columns.one(control, "draws") == 1
    drawing = jnp.where(draws, slot, slots.lengths.shape[0])
    decode, settings, stop_tokens = slot_state.rows_of(slots, drawing, table)
    before = decode.lengths
    decode = prefill.draw_next(
        decode, last_hidden, stop_tokens, spec.target, params.target, settings
    )
    result = spec.plain_result.join(
        num_committed=decode.lengths - before,
        finish=decode.finish,
        tokens=_tokens_from(decode, before, 1),
    )
    return slot_state.store(slots, drawing, decode), result[None]


def _tokens_from(decode: DecodeState, start: jax.Array, count: int) -> jax.Array:
    """`count` tokens of every row from position start[b] on, int32 [B, count]."""
    index = start[:, None] + jnp.arange(count, dtype=jnp.int32)[None]
    return jnp.take_along_axis(decode.tokens, index, axis=1, mode="clip")


def _repeat(step: Any, decode: PyTree, count: int) -> tuple[PyTree, jax.Array]:
    """`count` steps and their results, stacked; one step makes no loop."""
    if count == 1:
        decode, result = step(decode, None)
        return decode, result[None]
    return jax.lax.scan(step, decode, None, length=count)
