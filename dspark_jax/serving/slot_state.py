"""The state of all slots between steps, and how a batch's rows are read and put back.

A slot number that does not exist is padding: its row is done, and what is put back
for it is dropped.
"""

import functools
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dspark_jax import checks
from dspark_jax.paged_cache import PagePool
from dspark_jax.sampling import Sampling
from dspark_jax.serving.control import traced_from_bits
from dspark_jax.serving.step_spec import StepSpec
from dspark_jax.types import FINISH_LENGTH, RUNNING, DecodeState, PyTree


class SlotState(flax.struct.PyTreeNode):
    """All slots between steps. A slot's invariant is that of `DecodeState`."""

    key: jax.Array  # typed keys [slots]
    tokens: jax.Array  # int32 [slots, C]
    lengths: jax.Array  # int32 [slots]
    limits: jax.Array  # int32 [slots]
    finish: jax.Array  # int32 [slots]
    stop_tokens: jax.Array  # int32 [slots, n], padded with -1
    settings: Sampling  # fields [slots], or None
    target_pool: PagePool
    draft_pool: PagePool | None


class KnownTokens(NamedTuple):
    """The texts of all slots: the fields of `SlotState` of these names."""

    tokens: jax.Array  # int32 [slots, C]
    lengths: jax.Array  # int32 [slots]
    finish: jax.Array  # int32 [slots]


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


def make_deferred(
    spec: StepSpec, target_params: PyTree, num_slots: int, depth: int
) -> Float[Array, "slots depth MD"]:
    """Empty places for the taps of each slot's last `depth` tokens.

    Those of position p lie at p % depth; of a drafter without taps nothing does. Not a
    part of `SlotState`: only programs that touch them depend on their shape.
    """
    assert spec.drafter is not None
    tap_layers = spec.drafter.config.tap_layers
    if not tap_layers:
        return jnp.zeros((num_slots, depth, 0), jnp.float32)

    def taps(params: PyTree) -> jax.Array | None:
        row = jnp.zeros((1, 1), jnp.int32)
        cache = spec.target.init_cache(1, 8)
        return spec.target.forward(params, row, row, cache, tap_layers=tap_layers)[1]

    like = jax.eval_shape(taps, target_params)
    return jnp.zeros((num_slots, depth, like.shape[-1]), like.dtype)


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


def admit(
    spec: StepSpec, slots: SlotState, control: jax.Array, slot: jax.Array
) -> SlotState:
    """Writes what a request is into its slot; equal values from each of its pieces."""
    columns = spec.prefill_control
    length = columns.one(control, "length")
    put = functools.partial(_put, slot)
    fields = {}
    for field in spec.sampling_fields:
        value = columns.one(control, field)
        if field != "top_k":
            value = traced_from_bits(value)
        fields[field] = put(getattr(slots.settings, field), value)
    words = jax.random.key_data(slots.key)
    key = columns.of(control, "key").astype(jnp.uint32)
    anchor = columns.one(control, "anchor")
    stop_tokens = columns.of(control, "stop_tokens")
    return slots.replace(
        key=jax.random.wrap_key_data(put(words, key), impl=checks.KEY_IMPLEMENTATION),
        tokens=slots.tokens.at[slot, length - 1].set(anchor, mode="drop"),
        lengths=put(slots.lengths, length),
        limits=put(slots.limits, columns.one(control, "limit")),
        finish=put(slots.finish, jnp.full_like(length, RUNNING)),
        stop_tokens=put(slots.stop_tokens, stop_tokens),
        settings=Sampling(**fields),
    )


def rows_of(
    slots: SlotState, slot: Int[Array, "B"], table: Int[Array, "B pages"]
) -> tuple[DecodeState, Sampling, Int[Array, "B n"]]:
    """A batch's state, sampling and stop tokens; a row without a slot is done."""
    last = slots.lengths.shape[0] - 1
    at = jnp.minimum(slot, last)
    draft_pool = slots.draft_pool
    decode = DecodeState(
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
    settings = jax.tree.map(lambda x: x[at], slots.settings)
    return decode, settings, slots.stop_tokens[at]


def store(slots: SlotState, slot: jax.Array, decode: DecodeState) -> SlotState:
    """The slots with a batch's rows put back; rows without a slot are dropped."""
    put = functools.partial(_put, slot)
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


def _put(slot: jax.Array, stored: jax.Array, values: jax.Array) -> jax.Array:
    return stored.at[slot].set(values, mode="drop")
