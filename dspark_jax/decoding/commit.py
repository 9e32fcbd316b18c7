"""Commit: appends a round's tokens, cut at the first stop token and at the limit.

Stops and limits act here, before lengths, caches and statistics are touched, so that a
round never leaves anything beyond the end of a sequence.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dspark_jax import sampling
from dspark_jax.sampling import Sampling
from dspark_jax.types import (
    FINISH_LENGTH,
    FINISH_NON_FINITE,
    FINISH_STOP,
    RUNNING,
    DecodeState,
    Logprobs,
    Row,
)


def commit(
    state: DecodeState,
    new_tokens: Int[Array, "B W"],
    num_new: Int[Array, "B"],
    is_finite: Bool[Array, "B"],
    stop_tokens: Int[Array, "B n"],
    target_logits: Float[Array, "B W V"] | Float[Array, "T V"],
    target_row: Row,
    settings: Sampling,
) -> tuple[DecodeState, Int[Array, "B"]]:
    """Appends new_tokens[b, :num_new[b]] to every running sequence.

    Row w of `target_logits` and `target_row` is the distribution of new token w (read
    only where the state keeps log-probabilities: packed rows, [T, V], have none).
    `is_finite` False: the token after these has none, and a sequence that neither stops
    nor is full with them fails.

    Returns:
      The state (tokens, lengths, finish, logprobs) and num_committed [B].
    """
    offset = jnp.arange(new_tokens.shape[1], dtype=jnp.int32)[None]
    is_running = state.finish == RUNNING
    remaining = jnp.maximum(state.limits - state.lengths, 0)
    count = jnp.minimum(num_new, remaining)
    count = jnp.where(is_running, count, 0)
    is_stop = jnp.any(new_tokens[..., None] == stop_tokens[:, None], axis=-1)
    is_stop = is_stop & (offset < count[:, None])
    has_stop = jnp.any(is_stop, axis=1)
    first_stop = jnp.argmax(is_stop, axis=1).astype(jnp.int32)
    count = jnp.where(has_stop, first_stop + 1, count)
    is_new = offset < count[:, None]
    positions = jnp.where(is_new, state.lengths[:, None] + offset, -1)
    lengths = state.lengths + count
    finish = jnp.where(is_finite, RUNNING, FINISH_NON_FINITE)
    finish = jnp.where(lengths >= state.limits, FINISH_LENGTH, finish)
    finish = jnp.where(has_stop, FINISH_STOP, finish)
    logprobs = state.logprobs
    if logprobs is not None:
        raw, of_sampling = _logprobs(new_tokens, target_logits, target_row, settings)
        logprobs = Logprobs(
            raw=write_rows(logprobs.raw, raw, positions),
            sampling=write_rows(logprobs.sampling, of_sampling, positions),
        )
    state = state.replace(
        tokens=write_rows(state.tokens, new_tokens, positions),
        lengths=lengths,
        finish=jnp.where(is_running, finish, state.finish).astype(jnp.int32),
        logprobs=logprobs,
    )
    return state, count


def write_rows(buffer: Array, values: Array, positions: Int[Array, "B W"]) -> Array:
    """buffer [B, C] with values [B, W] at positions [B, W]; -1 writes nothing."""
    index = jnp.where(positions < 0, buffer.shape[1], positions)
    request = jnp.arange(buffer.shape[0], dtype=jnp.int32)[:, None]
    return buffer.at[request, index].set(values.astype(buffer.dtype), mode="drop")


def _logprobs(
    tokens: jax.Array, logits: jax.Array, row: Row, settings: Sampling
) -> tuple[jax.Array, jax.Array]:
    """log p of each token: of the raw logits, and of the sampling distribution."""
    logit = jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
    raw = logit - jax.nn.logsumexp(logits, axis=-1)
    temperature = settings.temperature
    if temperature is not None:
        temperature = temperature[:, None]
    return raw, sampling.log_probability(logit, row, temperature)
