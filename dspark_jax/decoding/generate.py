"""Generation loops: speculative and plain decoding, whole or a few rounds at a time.

Everything here is pure and unjitted: call it under your own `jit`, `vmap`, `scan` or
`shard_map`. `speculative_generate` is a `while_loop` over `speculative_round`; the
command line and the tests use the same round.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from dspark_jax import checks, sampling
from dspark_jax.config import Speculation
from dspark_jax.decoding import arguments, round
from dspark_jax.decoding import prefill as prefill_lib
from dspark_jax.sampling import Sampling
from dspark_jax.types import (
    FINISH_LENGTH,
    DecodeState,
    Drafter,
    Generation,
    Logprobs,
    PyTree,
    RoundInfo,
    Target,
)


def speculative_generate(
    key: jax.Array,
    tokens: Int[Array, "B P"],
    lengths: Int[Array, "B"],
    *,
    target: Target,
    target_params: PyTree,
    drafter: Drafter,
    drafter_params: PyTree,
    max_new_tokens: int,
    sampling: Sampling = Sampling(),  # noqa: B008 (frozen)
    options: Speculation = Speculation(),  # noqa: B008 (frozen)
    limits: Int[Array, "B"] | None = None,
    stop_tokens: Any = None,
    confidence_threshold: Any = None,
    confidence_temperatures: Any = None,
    num_samples: int = 1,
    return_logprobs: bool = False,
    return_state: bool = False,
) -> Generation:
    """Generates with speculative decoding; the words have the target's distribution.

    Args:
      key: typed keys [B * num_samples], or one key, which means `fold_in(key, row)`
        (inside `shard_map` rows are counted per shard: pass keys there).
      tokens: int32 [B, P], right-padded prompts.
      lengths: int32 [B], real prompt lengths, 1..P.
      target, target_params: the big model (`load_target`); `target` is static.
      drafter, drafter_params: the small model (`load_drafter`); `drafter` is static.
      max_new_tokens: static, >= 0.
      sampling: temperature and cuts; the default is greedy.
      options: static choices: draft length, rule, window predicate, candidates.
      limits: int32 [B * num_samples], new tokens per row, at most `max_new_tokens`.
      stop_tokens: ids (n,) or [B * num_samples, n], padded with -1; None takes the
        target's, () none. A committed stop token ends its row and is kept.
      confidence_threshold: [] or [B * num_samples], ends a verify window at the first
        slot whose confidence is below it; needs a drafter with a confidence head.
      confidence_temperatures: [K], calibration of the confidences per slot.
      num_samples: static; samples per prompt, drawn from one prefill. Rows come in the
        order prompt 0 sample 0, prompt 0 sample 1, ...
      return_logprobs: also return log-probabilities of the new tokens.
      return_state: also return the state, for `extend`; max_new_tokens must be >= 1.

    Returns:
      Generation: tokens [B * num_samples, P + max_new_tokens], new ones from lengths[b]
      on, over the prompt's padding; lengths; finish codes; logprobs; stats.

    Raises:
      ValueError, TypeError: an argument breaks a rule; values are checked where they
        are known (not under a trace).

    References:
      Leviathan et al. 2022; DSpark (arXiv 2607.05147) 3.1.
    """
    # All arguments are checked before any work is done.
    length = arguments.check_models(target, drafter, options, is_speculative=True)
    tokens, lengths = arguments.check_prompts(tokens, lengths, target)
    checks.check_int("num_samples", num_samples, 1)
    rows = tokens.shape[0] * num_samples
    threshold = arguments.make_threshold(confidence_threshold, drafter, rows)
    temperatures = arguments.make_temperatures(confidence_temperatures, length)
    start = _begin(
        key,
        tokens,
        lengths,
        target=target,
        target_params=target_params,
        drafter=drafter,
        drafter_params=drafter_params,
        max_new_tokens=max_new_tokens,
        settings=sampling,
        options=options,
        limits=limits,
        stop_tokens=stop_tokens,
        num_samples=num_samples,
        return_logprobs=return_logprobs,
        return_state=return_state,
    )
    if isinstance(start, Generation):
        return start
    state = speculative_rounds(
        start,
        None,
        target=target,
        target_params=target_params,
        drafter=drafter,
        drafter_params=drafter_params,
        sampling=sampling,
        options=options,
        stop_tokens=stop_tokens,
        confidence_threshold=threshold,
        confidence_temperatures=temperatures,
    )
    return to_generation(state, return_state=return_state)


def autoregressive_generate(
    key: jax.Array,
    tokens: Int[Array, "B P"],
    lengths: Int[Array, "B"],
    *,
    target: Target,
    target_params: PyTree,
    max_new_tokens: int,
    sampling: Sampling = Sampling(),  # noqa: B008 (frozen)
    limits: Int[Array, "B"] | None = None,
    stop_tokens: Any = None,
    num_samples: int = 1,
    return_logprobs: bool = False,
    return_state: bool = False,
) -> Generation:
    """Plain decoding, one token a step: the yardstick of `speculative_generate`.

    Arguments and result are those of `speculative_generate`, less the drafter's. Draws
    use TOKEN noise (`dspark_jax.noise`): with the same key the "seeded" rule gives
    exactly these words.
    """
    start = _begin(
        key,
        tokens,
        lengths,
        target=target,
        target_params=target_params,
        drafter=None,
        drafter_params=None,
        max_new_tokens=max_new_tokens,
        settings=sampling,
        options=Speculation(),
        limits=limits,
        stop_tokens=stop_tokens,
        num_samples=num_samples,
        return_logprobs=return_logprobs,
        return_state=return_state,
    )
    if isinstance(start, Generation):
        return start
    state = autoregressive_steps(
        start,
        None,
        target=target,
        target_params=target_params,
        sampling=sampling,
        stop_tokens=stop_tokens,
    )
    return to_generation(state, return_state=return_state)


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
    checks.check_int("max_new_tokens", max_new_tokens, 1)
    checks.check_int("num_samples", num_samples, 1)
    checks.check_int("capacity", capacity, 1)
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
        settings=_check_sampling(sampling, rows),
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
    checks.check_int("max_new_tokens", max_new_tokens, 1)
    begun = state.lengths + lengths
    known_begun = checks.known(begun)
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
        settings=_check_sampling(sampling, batch),
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
        settings=_check_sampling(sampling, batch),
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
    settings = _check_sampling(sampling, batch)
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


def to_generation(state: DecodeState, *, return_state: bool = False) -> Generation:
    """The Generation that a state holds."""
    return Generation(
        tokens=state.tokens,
        lengths=state.lengths,
        finish=state.finish,
        logprobs=state.logprobs,
        stats=state.stats,
        state=state if return_state else None,
    )


def _begin(
    key: Any,
    tokens: Any,
    lengths: Any,
    *,
    max_new_tokens: int,
    settings: Any,
    limits: Any,
    return_state: bool,
    **rest: Any,
) -> DecodeState | Generation:
    """`prefill` for one generation, or the prompts if nothing is asked."""
    target, num_samples = rest["target"], rest["num_samples"]
    arguments.check_models(target, rest["drafter"], rest["options"])
    checks.check_int("max_new_tokens", max_new_tokens, 0)
    checks.check_int("num_samples", num_samples, 1)
    tokens, lengths = arguments.check_prompts(tokens, lengths, target)
    capacity = tokens.shape[1] + max(max_new_tokens, 1)
    arguments_ = dict(rest, sampling=settings, capacity=capacity)
    if max_new_tokens > 0:
        return prefill(
            key,
            tokens,
            lengths,
            max_new_tokens=max_new_tokens,
            limits=limits,
            **arguments_,
        )
    if return_state:
        raise ValueError("`return_state` needs `max_new_tokens` >= 1, got 0")
    tokens_out, lengths_out = (jnp.repeat(x, num_samples, 0) for x in (tokens, lengths))
    arguments.make_limits(limits, 0, lengths_out, target)
    # Shapes and checks are those of a real call; no work is done.
    shapes = jax.eval_shape(
        lambda t, n: prefill(key, t, n, max_new_tokens=1, **arguments_), tokens, lengths
    )
    logprobs = None
    if rest["return_logprobs"]:
        zeros = jnp.zeros(tokens_out.shape, jnp.float32)
        logprobs = Logprobs(raw=zeros, sampling=zeros)
    return Generation(
        tokens=tokens_out,
        lengths=lengths_out,
        finish=jnp.full(lengths_out.shape, FINISH_LENGTH, jnp.int32),
        logprobs=logprobs,
        stats=jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes.stats),
    )


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


def _check_sampling(settings: Sampling, batch: int) -> Sampling:
    return sampling.check_sampling(settings, batch)
