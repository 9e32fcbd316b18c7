"""The step programs: prefill a chunk, a plain round, a speculative round.

Each takes the state of all slots (donated), one int32 array of what the host decided
(slots, page tables), and gives the state and one int32 array of what happened. The
rounds are decoding's own, over paged views of the rows that take part. Rows without a
slot are padding: they write nothing, and what they say is not read.
"""

import dataclasses
import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from dspark_jax import checks
from dspark_jax.config import Speculation
from dspark_jax.decoding import prefill, round
from dspark_jax.paged_cache import PagePool
from dspark_jax.sampling import Sampling
from dspark_jax.serving.control import Columns, traced_from_bits
from dspark_jax.types import (
    FINISH_LENGTH,
    RUNNING,
    DecodeState,
    Drafter,
    PyTree,
    Target,
)


class SlotState(flax.struct.PyTreeNode):
    """All slots between steps. A slot's invariant is that of `DecodeState`."""

    key: jax.Array  # typed keys [S]
    tokens: jax.Array  # int32 [S, C]
    lengths: jax.Array  # int32 [S]
    limits: jax.Array  # int32 [S]
    finish: jax.Array  # int32 [S]
    stop_tokens: jax.Array  # int32 [S, n], padded with -1
    settings: Sampling  # fields [S], or None
    target_pool: PagePool
    draft_pool: PagePool | None


@dataclasses.dataclass(frozen=True)
class StepSpec:
    """What is static about an engine's programs; equal ones share compiled code."""

    target: Target
    drafter: Drafter | None
    options: Speculation
    draft_length: int
    sampling_fields: tuple[str, ...]
    max_stop_tokens: int
    num_rounds: int
    caps_commit: bool
    is_budgeted: bool
    chunk: int
    pages_per_slot: int

    @property
    def round_control(self) -> Columns:
        """Of a round: who takes part, and their pages."""
        return Columns((("slot", 1), ("table", self.pages_per_slot)))

    @property
    def round_result(self) -> Columns:
        """Of a speculative round, a row a request."""
        length = self.draft_length
        return Columns(
            (
                ("num_committed", 1),
                ("finish", 1),
                ("verify_length", 1),
                ("commit_length", 1),
                ("num_accepted", 1),
                ("tokens", length + 1),
                ("confidence", length),
            )
        )

    @property
    def plain_result(self) -> Columns:
        """Of a plain round, or of the tokens drawn after a prompt."""
        return Columns((("num_committed", 1), ("finish", 1), ("tokens", 1)))

    @property
    def prefill_control(self) -> Columns:
        """A piece of a prompt, and the whole admission of its request."""
        return Columns(
            (
                ("slot", 1),
                ("draws", 1),  # 1: ends the prompt, and the next token is drawn
                ("first", 1),  # position of the piece's first token
                ("count", 1),
                ("length", 1),  # known tokens
                ("limit", 1),
                ("anchor", 1),  # the last known token
                ("key", 2),
                *((field, 1) for field in self.sampling_fields),
                ("stop_tokens", self.max_stop_tokens),
                ("table", self.pages_per_slot),
                ("tokens", self.chunk),
            )
        )


class Params(flax.struct.PyTreeNode):
    """What the programs read and never write."""

    target: Any
    drafter: Any
    temperatures: jax.Array | None  # float32 [K], of the confidences


def make_state(
    spec: StepSpec, num_slots: int, max_length: int, num_pages: int, page_size: int
) -> SlotState:
    """Empty slots and pools."""

    def pool(make_cache: Any) -> PagePool:
        like = jax.eval_shape(lambda: make_cache(1, page_size))
        return PagePool.create(like, num_pages, page_size)

    def zeros(*sizes: int) -> jax.Array:
        return jnp.zeros((num_slots, *sizes), jnp.int32)

    fields = {
        field: jnp.ones((num_slots,), jnp.int32 if field == "top_k" else jnp.float32)
        for field in spec.sampling_fields
    }
    words = jnp.zeros((num_slots, 2), jnp.uint32)
    return SlotState(
        key=jax.random.wrap_key_data(words, impl=checks.KEY_IMPLEMENTATION),
        tokens=zeros(max_length),
        lengths=zeros() + 1,
        limits=zeros(),
        finish=zeros() + FINISH_LENGTH,
        stop_tokens=zeros(spec.max_stop_tokens) - 1,
        settings=Sampling(**fields),
        target_pool=pool(spec.target.init_cache),
        draft_pool=None if spec.drafter is None else pool(spec.drafter.init_state),
    )


@functools.partial(
    jax.jit, static_argnames=("spec", "num_rows"), donate_argnames="slots"
)
def speculative_rounds(
    params: Params,
    slots: SlotState,
    control: Int[Array, "R X"],
    budget: Int[Array, ""],
    *,
    spec: StepSpec,
    num_rows: int,
) -> tuple[SlotState, Int[Array, "n R Y"]]:
    """Drafts, verifies `num_rows` packed rows and commits; `slots` is donated."""
    drafter = spec.drafter
    assert drafter is not None
    slot = spec.round_control.one(control, "slot")
    width = spec.draft_length + 1
    decode = _rows_of(slots, slot, spec.round_control.of(control, "table"))
    settings, stop_tokens = _settings_of(slots, slot)
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
    return _store(slots, slot, decode), result


@functools.partial(jax.jit, static_argnames="spec", donate_argnames="slots")
def plain_rounds(
    params: Params, slots: SlotState, control: Int[Array, "R X"], *, spec: StepSpec
) -> tuple[SlotState, Int[Array, "n R Y"]]:
    """One token a request without drafting; `slots` is donated.

    The drafter's context is kept up where there is one.
    """
    slot = spec.round_control.one(control, "slot")
    decode = _rows_of(slots, slot, spec.round_control.of(control, "table"))
    settings, stop_tokens = _settings_of(slots, slot)

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
    return _store(slots, slot, decode), result


@functools.partial(jax.jit, static_argnames="spec", donate_argnames="slots")
def prefill_chunk(
    params: Params, slots: SlotState, control: Int[Array, "N X"], *, spec: StepSpec
) -> tuple[SlotState, Int[Array, "1 N Y"]]:
    """Feeds a piece of a prompt per row and draws where one ends; `slots` is donated.

    Rows may be consecutive pieces of one request: all are written before any attends.
    """
    columns = spec.prefill_control
    slot = columns.one(control, "slot")
    slots = _admit(spec, slots, control, slot)
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
    decode = _rows_of(slots, drawing, table)
    settings, stop_tokens = _settings_of(slots, drawing)
    before = decode.lengths
    decode = prefill.draw_first(
        decode, last_hidden, stop_tokens, spec.target, params.target, settings
    )
    result = spec.plain_result.join(
        num_committed=decode.lengths - before,
        finish=decode.finish,
        tokens=_tokens_from(decode, before, 1),
    )
    return _store(slots, drawing, decode), result[None]


@functools.partial(jax.jit, donate_argnames="slots")
def fill_slots(slots: SlotState, length: Int[Array, ""]) -> SlotState:
    """All slots running with `length` known tokens of nothing; `slots` is donated.

    For measuring only: caches keep what they hold, zeros in a fresh state.
    """
    capacity = slots.tokens.shape[1]
    return slots.replace(
        tokens=jnp.zeros_like(slots.tokens),
        lengths=jnp.full_like(slots.lengths, length),
        limits=jnp.full_like(slots.limits, capacity),
        finish=jnp.full_like(slots.finish, RUNNING),
        stop_tokens=jnp.full_like(slots.stop_tokens, -1),
    )


def _admit(
    spec: StepSpec, slots: SlotState, control: jax.Array, slot: jax.Array
) -> SlotState:
    """Writes what a request is into its slot; equal values from each of its pieces."""
    columns = spec.prefill_control
    length = columns.one(control, "length")
    fields = {}
    for field in spec.sampling_fields:
        value = columns.one(control, field)
        if field != "top_k":
            value = traced_from_bits(value)
        stored = getattr(slots.settings, field)
        fields[field] = stored.at[slot].set(value, mode="drop")
    words = jax.random.key_data(slots.key)
    key = columns.of(control, "key").astype(jnp.uint32)
    anchor = columns.one(control, "anchor")
    stop_tokens = columns.of(control, "stop_tokens")

    def put(stored: jax.Array, values: jax.Array) -> jax.Array:
        return stored.at[slot].set(values, mode="drop")

    return slots.replace(
        key=jax.random.wrap_key_data(put(words, key), impl=checks.KEY_IMPLEMENTATION),
        tokens=slots.tokens.at[slot, length - 1].set(anchor, mode="drop"),
        lengths=put(slots.lengths, length),
        limits=put(slots.limits, columns.one(control, "limit")),
        finish=put(slots.finish, jnp.full_like(length, RUNNING)),
        stop_tokens=put(slots.stop_tokens, stop_tokens),
        settings=Sampling(**fields),
    )


def _rows_of(slots: SlotState, slot: jax.Array, table: jax.Array) -> DecodeState:
    """The slots of a batch as the state of its rows; a row without a slot is done."""
    last = slots.lengths.shape[0] - 1
    at = jnp.minimum(slot, last)
    draft_pool = slots.draft_pool
    return DecodeState(
        key=slots.key[at],
        tokens=slots.tokens[at],
        lengths=slots.lengths[at],
        limits=slots.limits[at],
        finish=jnp.where(slot <= last, slots.finish[at], FINISH_LENGTH),
        target_cache=slots.target_pool.view(table),
        drafter_state=None if draft_pool is None else draft_pool.view(table),
        stats=None,
        logprobs=None,
    )


def _settings_of(slots: SlotState, slot: jax.Array) -> tuple[Sampling, jax.Array]:
    at = jnp.minimum(slot, slots.lengths.shape[0] - 1)
    return jax.tree.map(lambda x: x[at], slots.settings), slots.stop_tokens[at]


def _store(slots: SlotState, slot: jax.Array, decode: DecodeState) -> SlotState:
    """The slots with a batch's rows put back; rows without a slot are dropped."""

    def put(stored: jax.Array, values: jax.Array) -> jax.Array:
        return stored.at[slot].set(values, mode="drop")

    draft_pool = slots.draft_pool
    if draft_pool is not None:
        draft_pool = decode.drafter_state.pool
    return slots.replace(
        tokens=put(slots.tokens, decode.tokens),
        lengths=put(slots.lengths, decode.lengths),
        finish=put(slots.finish, decode.finish),
        target_pool=decode.target_cache.pool,
        draft_pool=draft_pool,
    )


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
