"""Decoding in steps: what whole generations, streams and conversations are made of.

`prefill` feeds the prompts, rounds or plain steps draw the words, `extend` appends the
next turn. All is pure and unjitted: jit a few rounds with the state donated to stream.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from dspark_jax import checks
from dspark_jax import sampling as sampling_lib
from dspark_jax.config import Speculation
from dspark_jax.decoding import arguments, round
from dspark_jax.decoding import prefill as prefill_lib
from dspark_jax.sampling import Sampling
from dspark_jax.types import DecodeState, Drafter, PyTree, RoundInfo, Target


def prefill(
    key: jax.Array,
    tokens: Int[Array, "B P"],
    lengths: Int[Array, "B"],
    *,
    target: Target,
    target_params: PyTree,
    drafter: Drafter | None,
    drafter_params: PyTree,
    capacity: int,
    max_new_tokens: int,
    sampling: Sampling = Sampling(),  # noqa: B008 (frozen)
    options: Speculation = Speculation(),  # noqa: B008 (frozen)
    limits: Int[Array, "B"] | None = None,
    stop_tokens: Any = None,
    num_samples: int = 1,
    return_logprobs: bool = False,
) -> DecodeState:
    """Feeds the prompts and draws the first token: the state before the first round.

    Args:
      capacity: static, tokens that the caches and the buffer can hold; at least
        P + max_new_tokens (more for conversations that `extend` continues).
      drafter: None prepares plain decoding.
      (others): as in `speculative_generate`; max_new_tokens must be at least 1.

    Returns:
      DecodeState; its `lengths` already count the first new token.
    """
    length = arguments.check_models(target, drafter, options)
    tokens, lengths = arguments.check_prompts(tokens, lengths, target)
    width = tokens.shape[1]
    max_new_tokens = checks.check_int("max_new_tokens", max_new_tokens, 1)
    num_samples = checks.check_int("num_samples", num_samples, 1)
    capacity = checks.check_int("capacity", capacity, 1)
    if width > target.config.max_position:
        raise ValueError(
            "`tokens` must not be wider than the target's max_position "
            f"{target.config.max_position}, got {width}"
        )
    if capacity < width + max_new_tokens:
        raise ValueError(
            f"`capacity` must be at least P + max_new_tokens = {width} + "
            f"{max_new_tokens}, got {capacity}"
        )
    rows = tokens.shape[0] * num_samples
    repeated = jnp.repeat(lengths, num_samples)
    return prefill_lib.start(
        checks.request_keys(key, rows),
        tokens,
        lengths,
        arguments.make_limits(limits, max_new_tokens, repeated, target),
        arguments.make_stop_tokens(stop_tokens, target, rows),
        target=target,
        target_params=target_params,
        drafter=drafter,
        drafter_params=drafter_params,
        settings=sampling_lib.check_sampling(sampling, rows),
        capacity=capacity,
        draft_length=length,
        num_samples=num_samples,
        return_logprobs=return_logprobs,
    )


def extend(
    state: DecodeState,
    tokens: Int[Array, "B Q"],
    lengths: Int[Array, "B"],
    *,
    target: Target,
    target_params: PyTree,
    drafter: Drafter | None,
    drafter_params: PyTree,
    max_new_tokens: int,
    sampling: Sampling = Sampling(),  # noqa: B008 (frozen)
    options: Speculation = Speculation(),  # noqa: B008 (frozen)
    limits: Int[Array, "B"] | None = None,
    stop_tokens: Any = None,
) -> DecodeState:
    """Appends the next turn of a conversation, feeding it only, and draws one token.

    Args:
      state: from `prefill`, `extend` or `Generation.state`.
      tokens: int32 [B, Q], right-padded.
      lengths: int32 [B], 0..Q. A row with 0 goes on with its own text: what it draws
        now is what it would have drawn next, also after a stop token or its limit.
      (others): as in `speculative_generate`.

    Raises:
      ValueError: the state's capacity cannot hold the new turn and its answer, or the
        turn passes the target's last position. Under a trace lengths are unknown: a row
        whose turn does not fit then stays as it is and finishes by length.
    """
    arguments.check_models(target, drafter, options)
    arguments.check_state(state, drafter)
    tokens, lengths = arguments.check_prompts(
        tokens, lengths, target, may_be_empty=True
    )
    batch, capacity = state.tokens.shape
    checks.check_shape("tokens", tokens, "B Q", (batch, tokens.shape[1]))
    max_new_tokens = checks.check_int("max_new_tokens", max_new_tokens, 1)
    begun = state.lengths + lengths
    known_begun = checks.known("state", begun)
    if known_begun is not None:
        longest = int(known_begun.max())
        needed = longest + max_new_tokens
        if needed > capacity:
            raise ValueError(
                f"`state` holds {capacity} tokens, but this turn needs {needed}; call "
                "`prefill` with a larger capacity"
            )
        if longest > target.config.max_position:
            raise ValueError(
                "`tokens` must end by the target's max_position "
                f"{target.config.max_position}, got {longest}"
            )
    limits = arguments.make_limits(limits, max_new_tokens, begun, target)
    return prefill_lib.continue_from(
        state,
        tokens,
        lengths,
        jnp.minimum(limits, capacity),
        arguments.make_stop_tokens(stop_tokens, target, batch),
        target=target,
        target_params=target_params,
        drafter=drafter,
        drafter_params=drafter_params,
        settings=sampling_lib.check_sampling(sampling, batch),
    )


def speculative_round(
    state: DecodeState,
    *,
    target: Target,
    target_params: PyTree,
    drafter: Drafter,
    drafter_params: PyTree,
    sampling: Sampling = Sampling(),  # noqa: B008 (frozen)
    options: Speculation = Speculation(),  # noqa: B008 (frozen)
    stop_tokens: Any = None,
    confidence_threshold: Any = None,
    confidence_temperatures: Any = None,
    max_verify_length: Int[Array, "B"] | None = None,
) -> tuple[DecodeState, RoundInfo]:
    """Drafts, verifies and commits one block for every running request.

    Args:
      max_verify_length: int32 [B], a cap on the verify length that was decided before
        this round drafts (a budget from older confidences).
      (others): as in `speculative_generate`.

    Returns:
      The state, and RoundInfo: what was drafted, verified, accepted and committed.
    """
    length = arguments.check_models(target, drafter, options, is_speculative=True)
    arguments.check_state(state, drafter)
    arguments.check_draft_length(state, length)
    batch = state.tokens.shape[0]
    return round.speculative_step(
        state,
        target=target,
        target_params=target_params,
        drafter=drafter,
        drafter_params=drafter_params,
        settings=sampling_lib.check_sampling(sampling, batch),
        options=options,
        stop_tokens=arguments.make_stop_tokens(stop_tokens, target, batch),
        confidence_threshold=arguments.make_threshold(
            confidence_threshold, drafter, batch
        ),
        confidence_temperatures=arguments.make_temperatures(
            confidence_temperatures, length
        ),
        max_verify_length=arguments.make_cap(max_verify_length, batch),
    )


def speculative_rounds(
    state: DecodeState, num_rounds: int | None, **kwargs: Any
) -> DecodeState:
    """Runs `speculative_round` until all rows are done, or `num_rounds` times at most.

    `kwargs` are those of `speculative_round`. Jit it with the state donated to stream.
    """

    def step(state: DecodeState) -> DecodeState:
        return speculative_round(state, **kwargs)[0]

    return _repeat(step, state, num_rounds)


def autoregressive_steps(
    state: DecodeState,
    num_steps: int | None,
    *,
    target: Target,
    target_params: PyTree,
    sampling: Sampling = Sampling(),  # noqa: B008 (frozen)
    stop_tokens: Any = None,
) -> DecodeState:
    """Plain decoding until all rows are done, or `num_steps` tokens at most."""
    arguments.check_models(target, None, Speculation())
    arguments.check_state(state, None)
    batch = state.tokens.shape[0]
    settings = sampling_lib.check_sampling(sampling, batch)
    stops = arguments.make_stop_tokens(stop_tokens, target, batch)

    def step(state: DecodeState) -> DecodeState:
        return round.plain_step(
            state,
            target=target,
            target_params=target_params,
            settings=settings,
            stop_tokens=stops,
        )

    return _repeat(step, state, num_steps)


def _repeat(step: Any, state: DecodeState, count: int | None) -> DecodeState:
    if count is None:
        return jax.lax.while_loop(
            lambda state: jnp.any(~state.is_done), lambda state: step(state), state
        )

    def is_unfinished(carry: Any) -> jax.Array:
        index, state = carry
        return (index < count) & jnp.any(~state.is_done)

    def body(carry: Any) -> Any:
        index, state = carry
        return index + 1, step(state)

    return jax.lax.while_loop(is_unfinished, body, (jnp.int32(0), state))[1]
