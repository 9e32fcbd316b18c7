"""Checks and broadcasts the arguments that the public decoding functions share."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dspark_jax import checks
from dspark_jax.config import Speculation
from dspark_jax.types import DecodeState, Drafter, Target


def check_models(
    target: Target,
    drafter: Drafter | None,
    options: Speculation,
    *,
    is_speculative: bool = False,
) -> int:
    """Checks that drafter, target and options fit; returns the draft length K.

    Without a drafter, which only plain decoding may lack, K is 0.

    Raises:
      TypeError: not a Target, Drafter or Speculation.
      ValueError: a drafter of another target, a tap out of range, a draft length
        beyond the drafter's block size, a window of confidences that nobody predicts.
    """
    if not isinstance(target, Target):
        raise TypeError(f"`target` must be a Target, got {type(target).__name__}")
    if drafter is None and not is_speculative:
        return 0
    if not isinstance(drafter, Drafter):
        raise TypeError(f"`drafter` must be a Drafter, got {type(drafter).__name__}")
    if not isinstance(options, Speculation):
        raise TypeError(
            f"`options` must be a Speculation, got {type(options).__name__}"
        )
    checks.check_drafter_fits(drafter.config, target.config)
    length = options.draft_length or drafter.config.block_size
    if length > drafter.config.block_size:
        raise ValueError(
            "`options.draft_length` must be at most the drafter's block size "
            f"{drafter.config.block_size}, got {length}"
        )
    if options.keep is not None:
        check_confidence("options.keep", drafter)
    return length


def check_confidence(name: str, drafter: Drafter) -> None:
    """Raises ValueError if `drafter` is known to predict no confidences."""
    if getattr(drafter.config, "confidence_kind", None) == "none":
        raise ValueError(
            f"`{name}` needs a drafter with a confidence head, but its confidence_kind "
            "is 'none'"
        )


def check_state(state: Any, drafter: Drafter | None) -> None:
    """Raises unless `state` is a DecodeState, made with a drafter iff one is given."""
    if not isinstance(state, DecodeState):
        raise TypeError(f"`state` must be a DecodeState, got {type(state).__name__}")
    if drafter is not None and state.drafter_state is None and state.stats is None:
        raise ValueError(
            "`state` was made by a `prefill` without a drafter: it has no context to "
            "draft from"
        )
    if drafter is None and state.stats is not None:
        raise ValueError(
            "`state` was made with a drafter, whose context plain decoding would leave "
            "with holes: call `prefill` with drafter=None"
        )


def check_draft_length(state: DecodeState, length: int) -> None:
    """Raises ValueError unless the state's statistics are those of `length` slots."""
    if state.stats is not None and state.stats.verified_at.shape[1] != length:
        raise ValueError(
            "`options.draft_length` must be that of `prefill`, "
            f"{state.stats.verified_at.shape[1]}, got {length}"
        )


def check_prompts(
    tokens: Any, lengths: Any, target: Target, *, may_be_empty: bool = False
) -> tuple[Int[Array, "B P"], Int[Array, "B"]]:
    """Returns tokens and lengths as int32; values are checked where they are known."""
    given_tokens, given_lengths = tokens, lengths
    tokens = checks.as_array("tokens", tokens)
    lengths = checks.as_array("lengths", lengths)
    checks.check_rank("tokens", tokens, "B P")
    checks.check_integer("tokens", tokens)
    checks.check_integer("lengths", lengths)
    checks.check_shape("lengths", lengths, "B", tokens.shape[:1])
    if tokens.shape[0] == 0:
        raise ValueError("`tokens` must hold at least one request, got 0")
    if tokens.shape[1] == 0:
        raise ValueError("`tokens` must hold at least one token a row, got 0")
    last = target.config.vocab_size - 1
    checks.check_range("tokens", given_tokens, 0, last, f"0..{last} (the vocabulary)")
    least, width = 0 if may_be_empty else 1, tokens.shape[1]
    checks.check_range("lengths", given_lengths, least, width, f"{least}..{width}")
    return tokens.astype(jnp.int32), lengths.astype(jnp.int32)


def make_limits(
    limits: Any, max_new_tokens: int, lengths: Int[Array, "B"], target: Target
) -> Int[Array, "B"]:
    """The length that no row passes: prompt + its limit, and the last position + 1.

    The token after the target's last position can still be drawn, never fed.
    """
    if limits is None:
        limits = jnp.full(lengths.shape, max_new_tokens, jnp.int32)
    given, limits = limits, checks.as_array("limits", limits)
    checks.check_integer("limits", limits)
    checks.check_shape("limits", limits, "B", lengths.shape)
    rule = f"0..max_new_tokens = 0..{max_new_tokens}"
    checks.check_range("limits", given, 0, max_new_tokens, rule)
    limits = jnp.clip(limits.astype(jnp.int32), 0, max_new_tokens)
    return jnp.minimum(lengths + limits, target.config.max_position + 1)


def make_stop_tokens(
    stop_tokens: Sequence[int] | Any | None, target: Target, batch: int
) -> Int[Array, "B n"]:
    """Stop tokens [B, n], padded with -1; None takes the target's."""
    if stop_tokens is None:
        stop_tokens = target.config.stop_tokens
    if isinstance(stop_tokens, list | tuple) and not stop_tokens:
        stop_tokens = np.zeros((0,), np.int32)
    array = checks.as_array("stop_tokens", stop_tokens)
    checks.check_integer("stop_tokens", array)
    last = target.config.vocab_size - 1
    rule = f"0..{last} (the vocabulary), or be the padding -1"
    checks.check_range("stop_tokens", stop_tokens, -1, last, rule)
    if array.ndim not in (1, 2) or (array.ndim == 2 and array.shape[0] != batch):
        raise ValueError(
            f"`stop_tokens` must have shape (n,) or (B, n) = ({batch}, n), got "
            f"{array.shape}"
        )
    if array.shape[-1] == 0:
        return jnp.full((batch, 1), -1, jnp.int32)
    if array.ndim == 1:
        array = array[None]
    return jnp.broadcast_to(array.astype(jnp.int32), (batch, array.shape[-1]))


def make_threshold(
    threshold: Any, drafter: Drafter, batch: int
) -> Float[Array, "B"] | None:
    """The confidence threshold per request, or None."""
    if threshold is None:
        return None
    known = checks.known("confidence_threshold", threshold)
    if known is not None:
        is_number = checks.is_numeric(known.dtype)
        if not is_number or not np.all((known >= 0) & (known <= 1)):
            raise ValueError(
                f"`confidence_threshold` must lie in [0, 1], got {threshold}"
            )
    check_confidence("confidence_threshold", drafter)
    array = jnp.asarray(threshold, jnp.float32)
    if array.shape not in ((), (batch,)):
        raise ValueError(
            f"`confidence_threshold` must have shape () or (B,) = ({batch},), got "
            f"{array.shape}"
        )
    return jnp.broadcast_to(array, (batch,))


def make_temperatures(temperatures: Any, length: int) -> Float[Array, "K"] | None:
    """The confidence temperatures of the K slots, or None."""
    if temperatures is None:
        return None
    known = checks.known("confidence_temperatures", temperatures)
    if known is not None:
        is_number = checks.is_numeric(known.dtype)
        if not is_number or not np.all((known > 0) & np.isfinite(known)):
            raise ValueError(
                "`confidence_temperatures` must be positive and finite, got "
                f"{temperatures}"
            )
    array = jnp.asarray(temperatures, jnp.float32)
    if array.ndim != 1 or array.shape[0] < length:
        raise ValueError(
            "`confidence_temperatures` must have one value a slot, at least "
            f"({length},), got {array.shape}"
        )
    return array


def make_cap(cap: Any, batch: int) -> Int[Array, "B"] | None:
    """The cap on the verify length per request, or None."""
    if cap is None:
        return None
    array = checks.as_array("max_verify_length", cap)
    checks.check_integer("max_verify_length", array)
    checks.check_shape("max_verify_length", array, "B", (batch,))
    checks.check_range("max_verify_length", cap, 0, 2**31 - 1, "0..2**31 - 1")
    return array.astype(jnp.int32)
