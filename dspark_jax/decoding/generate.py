"""Whole generations: speculative and plain decoding.

Everything here is pure and unjitted: call it under your own `jit`, `vmap`, `scan` or
`shard_map`. `speculative_generate` is a `while_loop` over `speculative_round` (see
`stepwise`); the command line and the tests use the same round.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from dspark_jax import checks
from dspark_jax.config import Speculation
from dspark_jax.decoding import arguments, stepwise
from dspark_jax.sampling import Sampling
from dspark_jax.types import (
    FINISH_LENGTH,
    DecodeState,
    Drafter,
    Generation,
    Logprobs,
    PyTree,
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
    num_samples = checks.check_int("num_samples", num_samples, 1)
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
    state = stepwise.speculative_rounds(
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
    state = stepwise.autoregressive_steps(
        start,
        None,
        target=target,
        target_params=target_params,
        sampling=sampling,
        stop_tokens=stop_tokens,
    )
    return to_generation(state, return_state=return_state)


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
    target = rest["target"]
    arguments.check_models(target, rest["drafter"], rest["options"])
    max_new_tokens = checks.check_int("max_new_tokens", max_new_tokens, 0)
    num_samples = checks.check_int("num_samples", rest["num_samples"], 1)
    tokens, lengths = arguments.check_prompts(tokens, lengths, target)
    capacity = tokens.shape[1] + max(max_new_tokens, 1)
    if capacity > checks.INT32_MAX:
        raise ValueError(
            "`max_new_tokens` must leave room for the prompt below 2^31 tokens, got "
            f"{max_new_tokens}"
        )
    arguments_ = dict(rest, sampling=settings, capacity=capacity)
    if max_new_tokens > 0:
        return stepwise.prefill(
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
        lambda t, n: stepwise.prefill(key, t, n, max_new_tokens=1, **arguments_),
        tokens,
        lengths,
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
