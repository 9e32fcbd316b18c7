"""Verify windows: how many of a request's drafts are sent to the target.

The length l in 0..K must be decided without the tokens whose fate it decides: {l >= k}
may depend on x_1 .. x_{k-1} only, or the output is biased (paper, appendix A).
Predicates therefore see one slot at a time, from left to right, and end the window at
their first False; budgets come from older rounds.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dspark_jax.types import Draft

KeepPredicate = Callable[[int, jax.Array, jax.Array], jax.Array]


def confidences(
    draft: Draft, temperatures: Float[Array, "K"] | None
) -> Float[Array, "B K"] | None:
    """sigmoid(logit / temperature) per slot, float32; a non-finite one counts as 0."""
    if draft.confidence_logits is None:
        return None
    logits = draft.confidence_logits
    if temperatures is not None:
        logits = logits / temperatures[None, : logits.shape[1]]
    confidence = jax.nn.sigmoid(jnp.where(jnp.isfinite(logits), logits, 0.0))
    return jnp.where(jnp.isfinite(logits), confidence, 0.0)


def window_length(
    draft: Draft,
    confidence: Float[Array, "B K"] | None,
    remaining: Int[Array, "B"],
    stop_tokens: Int[Array, "B n"],
    *,
    keep: KeepPredicate | None = None,
    threshold: Float[Array, "B"] | None = None,
    max_verify_length: Int[Array, "B"] | None = None,
) -> Int[Array, "B"]:
    """The verify length l of each request.

    The smallest of: the slots offered, the first slot that `keep` or the threshold
    refuses, the given cap, the first drafted stop token (which is kept: it may be
    accepted), and remaining - 1, so that accepted drafts and the next token never pass
    a limit.

    Args:
      remaining: tokens that may still be committed.
      stop_tokens: padded with -1.
      keep: see `Speculation.keep`.
      threshold: ends the window at the first slot whose confidence is below it.
      max_verify_length: decided before this round's draft was made.
    """
    batch, length = draft.tokens.shape
    keeps = jnp.ones((batch, length), bool)
    if keep is not None or threshold is not None:
        if confidence is None:
            raise ValueError(
                "`keep` and `confidence_threshold` need a drafter with a confidence "
                "head, got one without"
            )
        survival = jnp.ones((batch,), jnp.float32)
        columns = []
        for k in range(length):
            survival = survival * confidence[:, k]
            column = jnp.ones((batch,), bool)
            if threshold is not None:
                column = column & (confidence[:, k] >= threshold)
            if keep is not None:
                column = column & _checked(keep(k, confidence[:, k], survival), batch)
            columns.append(column)
        keeps = jnp.stack(columns, axis=1)
    if draft.length is not None:
        slots = jnp.arange(length, dtype=jnp.int32)[None]
        keeps = keeps & (slots < draft.length[:, None])
    # A slot after a drafted stop token would only be verified to be thrown away.
    keeps = keeps & _before_stop(draft, stop_tokens)
    leading = jnp.cumprod(keeps, axis=1, dtype=jnp.int32)
    window = jnp.sum(leading, axis=1, dtype=jnp.int32)
    if max_verify_length is not None:
        window = jnp.minimum(window, max_verify_length)
    return jnp.clip(window, 0, jnp.maximum(remaining - 1, 0)).astype(jnp.int32)


def allocate(
    survival: Float[Array, "B K"], budget: Int[Array, ""] | int
) -> Int[Array, "B"]:
    """Verify lengths: the `budget` slots with the highest survival, over all requests.

    Equal survivals go by slot, then by request; never by anything made of token values.
    Slot k of a request is compared by its own survival, which the tokens before it
    decide, and later slots of its block never stand above it: live confidences are
    allowed, as long as the budget comes from an earlier step (appendix A).
    A slot whose survival is 0 or not finite is never verified, nor is one after it.

    `dspark_jax.scheduling.planner.allocate` is the reference on the host.

    Args:
      survival: not increasing along K (a rise is ignored).
      budget: traced, drafts to verify; below 0 counts as 0.
    """
    batch, length = survival.shape
    alive = jnp.where(jnp.isfinite(survival), survival, 0.0).astype(jnp.float32)
    # Some devices take numbers below the normal ones for 0, so all of them do here.
    alive = jnp.where(alive < jnp.finfo(jnp.float32).tiny, 0.0, alive)
    alive = jax.lax.cummin(alive, axis=1)
    # In the order of ties: all first slots, then all second ones.
    flat = alive.T.reshape(-1)  # [K * B]
    budget = jnp.clip(jnp.asarray(budget, jnp.int32), 0, batch * length)
    falling = -jax.lax.sort(-flat)
    last = falling[jnp.maximum(budget - 1, 0)]  # the lowest survival that still wins
    is_above = flat > last
    is_level = (flat == last) & (flat > 0)
    left = budget - jnp.sum(is_above, dtype=jnp.int32)
    wins = is_above | (is_level & (jnp.cumsum(is_level, dtype=jnp.int32) <= left))
    return jnp.sum(wins.reshape(length, batch), axis=0, dtype=jnp.int32)


def _before_stop(draft: Draft, stop_tokens: Int[Array, "B n"]) -> Bool[Array, "B K"]:
    """Slots up to the first drafted stop token, that one included."""
    is_stop = jnp.any(draft.tokens[..., None] == stop_tokens[:, None], axis=-1)
    stopped = jnp.cumsum(is_stop.astype(jnp.int32), axis=1) - is_stop.astype(jnp.int32)
    return stopped == 0


def _checked(keeps: jax.Array, batch: int) -> jax.Array:
    shape, dtype = jnp.shape(keeps), jnp.result_type(keeps)
    if shape != (batch,) or dtype != jnp.bool_:
        raise ValueError(
            f"`options.keep` must return bool (B,) = ({batch},), got {dtype} {shape}"
        )
    return keeps
