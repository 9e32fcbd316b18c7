"""The step programs: prefill a chunk, a plain round, a speculative round.

Each takes the state of all slots (donated), one int32 array of what the host decided
(slots, page tables), and gives the state and one int32 array of what happened. The
rounds are decoding's own, over paged views of the rows that take part. Rows without a
slot are padding: they write nothing, and what they say is not read.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from dspark_jax.decoding import prefill, round
from dspark_jax.serving import slot_state
from dspark_jax.serving.slot_state import SlotState
from dspark_jax.serving.step_spec import Params, StepSpec
from dspark_jax.types import DecodeState, PyTree


@functools.partial(
    jax.jit, static_argnames=("spec", "num_rows"), donate_argnames="slots"
)
def speculative_rounds(
    params: Params,
    slots: SlotState,
    control: Int[Array, "R X"],
    *,
    spec: StepSpec,
    num_rows: int,
) -> tuple[SlotState, Int[Array, "n R Y"]]:
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


@functools.partial(jax.jit, static_argnames="spec", donate_argnames="slots")
def plain_rounds(
    params: Params, slots: SlotState, control: Int[Array, "R X"], *, spec: StepSpec
) -> tuple[SlotState, Int[Array, "n R Y"]]:
    """One token a request without drafting; `slots` is donated.

    The drafter's context is kept up where there is one.
    """
    slot = spec.round_control.one(control, "slot")
    decode, settings, stop_tokens = slot_state.rows_of(
        slots, slot, spec.round_control.of(control, "table")
    )

    def one_round(decode: DecodeState, _: Any) -> tuple[DecodeState, jax.Array]:
        before = decode.lengths
        decode = round.plain_step(
            decode,
            target=spec.target,
            target_params=params.target,
            settings=settings,
            stop_tokens=stop_tokens,
            drafter=spec.drafter,
            drafter_params=params.drafter,
        )
        return decode, spec.plain_result.join(
            num_committed=decode.lengths - before,
            finish=decode.finish,
            tokens=_tokens_from(decode, before, 1),
        )

    decode, result = _repeat(one_round, decode, spec.num_rounds)
    return slot_state.store(slots, slot, decode), result


@functools.partial(jax.jit, static_argnames="spec", donate_argnames="slots")
def prefill_chunk(
    params: Params, slots: SlotState, control: Int[Array, "N X"], *, spec: StepSpec
) -> tuple[SlotState, Int[Array, "1 N Y"]]:
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
    last_hidden = jnp.take_along_axis(hidden, last, axis=1)[:, 0]  # [N, D]
    draws = columns.one(control, "draws") == 1
    drawing = jnp.where(draws, slot, slots.lengths.shape[0])
    decode, settings, stop_tokens = slot_state.rows_of(slots, drawing, table)
    before = decode.lengths
    decode = prefill.draw_first(
        decode, last_hidden, stop_tokens, spec.target, params.target, settings
    )
    result = spec.plain_result.join(
        num_committed=decode.lengths - before,
        finish=decode.finish,
        tokens=_tokens_from(decode, before, 1),
    )
    return slot_state.store(slots, drawing, decode), result[None]


def _tokens_from(decode: DecodeState, start: jax.Array, count: int) -> jax.Array:
    """`count` tokens of every row from position start[b] on, int32 [R, count]."""
    index = start[:, None] + jnp.arange(count, dtype=jnp.int32)[None]
    return jnp.take_along_axis(decode.tokens, index, axis=1, mode="clip")


def _repeat(step: Any, decode: PyTree, count: int) -> tuple[PyTree, jax.Array]:
    """`count` steps and their results, stacked; one step makes no loop."""
    if count == 1:
        decode, result = step(decode, None)
        return decode, result[None]
    return jax.lax.scan(step, decode, None, length=count)
