"""The training objective: CE + L1 between the slots' distributions + confidence BCE.

L = (sum_k w_k (a CE_k + b |p_k - q_k|_1 + c BCE_k)) / sum_k w_k, w_k = exp(-k/decay) on
supervised slots (paper eq. 10-12; DeepSpec's one denominator for all terms). Two more
terms can be asked for: KL(q | p), weighted alike, and the joint L1 of a block,
-sum_k prod_{i<=k} (1 - |p_i - q_i|_1 / 2), which is minus the expected number of
accepted drafts of a teacher-forced block. `vocabulary` computes the terms that look at
the vocabulary.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

EPSILON = 1e-6  # on the denominator


class TermWeights(NamedTuple):
    """Weights of one drafter's terms, float32 []; None: the term is not computed."""

    ce: jax.Array
    l1: jax.Array
    kl: jax.Array | None = None
    joint: jax.Array | None = None  # per block, not per weighted slot


class SlotTerms(NamedTuple):
    """Per slot, unweighted, without gradient."""

    ce: jax.Array  # float32 [B, A, K]
    l1: jax.Array  # float32 [B, A, K]
    log_ratio: jax.Array  # float32 [B, A, K], log p(label) - log q(label)
    kl: jax.Array | None = None  # float32 [B, A, K]


def slot_weights(
    is_supervised: Bool[Array, "B A K"], decay: float
) -> Float[Array, "B A K"]:
    """exp(-k / decay) on supervised slots, 0 elsewhere; decay 0: 1 on all of them."""
    weights = is_supervised.astype(jnp.float32)
    if decay == 0:
        return weights
    slots = jnp.arange(is_supervised.shape[-1], dtype=jnp.float32)[None, None, :]
    return weights * jnp.exp(-slots / jnp.float32(decay))


def weighted_mean(values: jax.Array, weights: jax.Array) -> jax.Array:
    """sum(w * values) / (sum(w) + 1e-6), over the global batch."""
    return jnp.sum(weights * values) / (jnp.sum(weights) + jnp.float32(EPSILON))


def accept_rate(l1: Float[Array, "..."]) -> Float[Array, "..."]:
    """1 - |p - q|_1 / 2: the chance that a draft from p survives a test against q."""
    return jnp.clip(1 - l1 / 2, 0.0, 1.0)


def expected_accepted(accept: Float[Array, "... K"]) -> Float[Array, "..."]:
    """sum_k prod_{i<=k} a_i: how many drafts of a block are accepted on average."""
    return jnp.sum(jnp.cumprod(accept, axis=-1), axis=-1)


def confidence_loss(
    confidence_logits: Float[Array, "B A K"], label: Float[Array, "B A K"]
) -> Float[Array, "B A K"]:
    """Binary cross-entropy per slot against the acceptance rate (no gradient to it)."""
    label = jax.lax.stop_gradient(label)
    # max(x, 0) - x y + log(1 + exp(-|x|)): stable for large logits.
    x = confidence_logits
    return jnp.maximum(x, 0.0) - x * label + jnp.log1p(jnp.exp(-jnp.abs(x)))


def metrics(
    terms: SlotTerms,
    confidence_logits: Float[Array, "B A K"] | None,
    is_supervised: Bool[Array, "B A K"],
    weights: Float[Array, "B A K"],
    starts: Float[Array, "B A"] | None = None,
) -> dict[str, tuple[jax.Array, jax.Array]]:
    """DeepSpec's training metrics as (numerator, denominator): sum both, then divide.

    `accept_rate` is [K], by slot. `tau_probabilistic` is 1 + sum_k prod_{i<=k} accept_i
    averaged over blocks with a supervised slot: an upper-biased stand-in for τ. With
    the chances `starts` that a round begins at each block, `tau_rounds` is the same
    average over rounds: what τ is in expectation on texts drawn at temperature 1.
    """
    accept = accept_rate(terms.l1)
    mask = is_supervised.astype(jnp.float32)
    has_slots = mask[..., 0]
    total = jnp.sum(weights)
    found = {
        "ce_loss": (jnp.sum(weights * terms.ce), total),
        "l1_loss": (jnp.sum(weights * terms.l1), total),
        "accept_rate": (jnp.sum(accept * mask, (0, 1)), jnp.sum(mask, (0, 1))),
        "tau_probabilistic": (
            jnp.sum(has_slots * (1 + expected_accepted(accept * mask))),
            jnp.sum(has_slots),
        ),
    }
    if starts is not None:
        rounds = starts * has_slots
        length = 1 + expected_accepted(accept * mask)
        found["tau_rounds"] = (jnp.sum(rounds * length), jnp.sum(rounds))
    if terms.kl is not None:
        found["kl_loss"] = (jnp.sum(weights * terms.kl), total)
    if confidence_logits is not None:
        confidence = jax.nn.sigmoid(confidence_logits)
        error = confidence - accept
        drift = jnp.cumprod(confidence, axis=-1) - jnp.cumprod(accept, axis=-1)
        bce = confidence_loss(confidence_logits, accept)
        found["confidence_loss"] = (jnp.sum(weights * bce), total)
        found["confidence_abs_error"] = (jnp.sum(weights * jnp.abs(error)), total)
        found["confidence_bias"] = (jnp.sum(weights * error), total)
        found["confidence_cumprod_bias"] = (jnp.sum(weights * drift), total)
    return found
