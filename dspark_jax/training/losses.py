"""The training objective: CE + L1 between the slots' distributions + confidence BCE.

L = (sum_k w_k (a CE_k + b |p_k - q_k|_1 + c BCE_k)) / sum_k w_k, w_k = exp(-k/decay) on
supervised slots (paper eq. 10-12; DeepSpec's one denominator for all terms). Logits
of all slots would be [A, K, V] float32 for every sequence: they are made, compared and
differentiated in chunks of anchors instead. The gradient with respect to the logits is
known in closed form,

  d/dx_v = w (a (p_v - [v = label]) + b p_v (s_v - sum_u p_u s_u)),  s = sign(p - q),

so one pass gives the loss and the gradients of hidden states and W2: nothing is kept
and nothing is recomputed. `reference_terms` is the same without chunks, for tests.
"""

import functools
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dspark_jax import layers
from dspark_jax.types import PyTree, Target

EPSILON = 1e-6  # on the denominator


class DraftRows(flax.struct.PyTreeNode):
    """What one drafter needs for its logits: head @ hidden + w2 @ feature."""

    hidden: jax.Array  # [B, A, K, D]
    feature: jax.Array | None  # [B, A, K, R]; None: no Markov head
    w2: jax.Array | None  # [V, R]


class SlotTerms(NamedTuple):
    """Per slot, unweighted, without gradient."""

    ce: jax.Array  # float32 [B, A, K]
    l1: jax.Array  # float32 [B, A, K]


class ReferenceTerms(NamedTuple):
    """Everything about every slot, differentiable."""

    base_logits: jax.Array  # float32 [B, A, K, V]
    draft_logits: jax.Array  # float32 [B, A, K, V]
    target_logits: jax.Array  # float32 [B, A, K, V], aligned with the labels
    ce: jax.Array  # float32 [B, A, K]
    l1: jax.Array  # float32 [B, A, K]


def slot_weights(
    is_supervised: Bool[Array, "B A K"], decay: float | None
) -> Float[Array, "B A K"]:
    """exp(-k / decay) on supervised slots, 0 elsewhere; no decay: 1 on all of them."""
    weights = is_supervised.astype(jnp.float32)
    if decay is None:
        return weights
    slots = jnp.arange(is_supervised.shape[-1], dtype=jnp.float32)[None, None, :]
    return weights * jnp.exp(-slots / jnp.float32(decay))


def weighted_mean(values: jax.Array, weights: jax.Array) -> jax.Array:
    """sum(w * values) / (sum(w) + 1e-6), over the global batch."""
    return jnp.sum(weights * values) / (jnp.sum(weights) + jnp.float32(EPSILON))


def accept_rate(l1: Float[Array, "..."]) -> Float[Array, "..."]:
    """1 - |p - q|_1 / 2: the chance that a draft from p survives a test against q."""
    return jnp.clip(1 - l1 / 2, 0.0, 1.0)


def vocabulary_loss(
    drafts: tuple[DraftRows, ...],
    head: Float[Array, "V D"],
    target_hidden: Float[Array, "B A K D"],
    labels: Int[Array, "B A K"],
    weights: Float[Array, "B A K"],
    ce_weight: Float[Array, ""],
    l1_weight: Float[Array, ""],
    *,
    chunk_slots: int = 4096,
) -> tuple[tuple[jax.Array, ...], tuple[SlotTerms, ...]]:
    """The part of each drafter's loss that looks at the vocabulary, chunk by chunk.

    The target's distribution is made once per chunk for all drafters. Gradients flow to
    the drafts only (`head` is frozen).

    Args:
      head: the frozen output matrix, of target and drafters alike (`head_matrix`).
      target_hidden: the target's states that predict the labels.
      weights: w / (sum w + 1e-6), 0 on unsupervised slots.
      ce_weight, l1_weight: float32 scalars, traced.
      chunk_slots: about how many slots have logits at one time; chunks are groups of
        anchors over the whole batch, so that a sharded batch stays where it is.

    Returns:
      sum w (a CE + b L1) per drafter, and the per-slot terms without gradient.
    """
    losses, terms = _vocabulary_loss(
        chunk_slots, drafts, head, target_hidden, labels, weights, ce_weight, l1_weight
    )
    return losses, jax.lax.stop_gradient(terms)


def reference_terms(
    draft: DraftRows,
    head: Float[Array, "V D"],
    target_hidden: Float[Array, "B A K D"],
    labels: Int[Array, "B A K"],
) -> ReferenceTerms:
    """The per-slot terms and all logits, without chunks (small shapes only)."""
    base = layers.unembed(draft.hidden, head)
    logits = base
    if draft.feature is not None and draft.w2 is not None:
        logits = logits + layers.unembed(draft.feature, draft.w2)
    target = jax.lax.stop_gradient(layers.unembed(target_hidden, head))
    log_p = jax.nn.log_softmax(logits, axis=-1)
    ce = -jnp.take_along_axis(log_p, labels[..., None], axis=-1)[..., 0]
    distance = jnp.abs(
        jax.nn.softmax(logits, axis=-1) - jax.nn.softmax(target, axis=-1)
    )
    return ReferenceTerms(base, logits, target, ce, jnp.sum(distance, axis=-1))


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
) -> dict[str, tuple[jax.Array, jax.Array]]:
    """DeepSpec's training metrics as (numerator, denominator): sum both, then divide.

    `accept_rate` is [K], by slot. `tau_probabilistic` is 1 + sum_k prod_{i<=k} accept_i
    averaged over blocks with a supervised slot: an upper-biased stand-in for τ.
    """
    accept = accept_rate(terms.l1)
    mask = is_supervised.astype(jnp.float32)
    survival = jnp.cumprod(accept * mask, axis=-1)
    has_slots = mask[..., 0]
    total = jnp.sum(weights)
    found = {
        "ce_loss": (jnp.sum(weights * terms.ce), total),
        "l1_loss": (jnp.sum(weights * terms.l1), total),
        "accept_rate": (jnp.sum(accept * mask, (0, 1)), jnp.sum(mask, (0, 1))),
        "tau_probabilistic": (
            jnp.sum(has_slots * (1 + jnp.sum(survival, axis=-1))),
            jnp.sum(has_slots),
        ),
    }
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


def head_matrix(target: Target, target_params: PyTree) -> Float[Array, "V D"]:
    """The target's output matrix, cropped to the true vocabulary.

    A target's head is only known as a linear function: it is applied to the basis.
    """
    width = target.config.width
    dtype = layers.dtype_of(getattr(target.config, "compute_dtype", "float32"))
    columns = target.unembed(target_params, jnp.eye(width, dtype=dtype))  # [D, V]
    return columns.T.astype(dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _vocabulary_loss(chunk_slots, *arguments):
    return _run_chunks(chunk_slots, False, *arguments)[:2]


def _forward(chunk_slots, *arguments):
    losses, terms, gradients = _run_chunks(chunk_slots, True, *arguments)
    return (losses, terms), (gradients, arguments)


def _backward(chunk_slots, saved, cotangents):
    gradients, (_, head, target_hidden, _, weights, _, _) = saved
    drafts = tuple(
        jax.tree.map(lambda x, scale=scale: x * scale.astype(x.dtype), gradient)
        for gradient, scale in zip(gradients, cotangents[0], strict=True)
    )
    # Frozen or constant: zeros that nobody reads are removed by the compiler.
    zero = jnp.float32(0)
    frozen = jnp.zeros_like(head), jnp.zeros_like(target_hidden)
    return (drafts, *frozen, None, jnp.zeros_like(weights), zero, zero)


_vocabulary_loss.defvjp(_forward, _backward)


def _run_chunks(
    chunk_slots,
    with_gradient,
    drafts,
    head,
    target_hidden,
    labels,
    weights,
    ce_weight,
    l1_weight,
):
    batch, num_anchors, block_size = labels.shape
    per_chunk = _anchors_per_chunk(num_anchors, batch * block_size, chunk_slots)
    matrices = tuple(_matrix(head, draft) for draft in drafts)

    def split(x):  # [B, A, ...] -> [chunks, B, anchors of a chunk, ...]
        x = x.reshape(batch, num_anchors // per_chunk, per_chunk, *x.shape[2:])
        return jnp.moveaxis(x, 1, 0)

    def join(x):
        x = jnp.moveaxis(x, 0, 1)
        return x.reshape(batch, num_anchors, *x.shape[3:])

    def chunk(w2_gradients, rows):
        inputs, target_rows, label, weight = rows
        target_logits = _logits(target_rows, head)
        target_norm = jax.nn.logsumexp(target_logits, axis=-1, keepdims=True)
        outputs, accumulated = [], []
        for row, matrix, w2_gradient in zip(
            inputs, matrices, w2_gradients, strict=True
        ):
            terms, gradient = _compare(
                _logits(row, matrix),
                target_logits,
                target_norm,
                label,
                weight,
                ce_weight,
                l1_weight,
            )
            row_gradient = None
            if with_gradient:
                gradient = gradient.astype(row.dtype)
                row_gradient = _product(gradient, matrix, 3, 0).astype(row.dtype)
                if w2_gradient is not None:
                    feature = row[..., head.shape[1] :]
                    w2_gradient = w2_gradient + _outer(gradient, feature)
            outputs.append((terms, row_gradient))
            accumulated.append(w2_gradient)
        return tuple(accumulated), tuple(outputs)

    rows = tuple(_rows(draft) for draft in drafts)
    w2_start = tuple(
        jnp.zeros(draft.w2.shape, jnp.float32)
        if with_gradient and draft.w2 is not None
        else None
        for draft in drafts
    )
    xs = jax.tree.map(split, (rows, target_hidden, labels, weights))
    w2_gradients, outputs = jax.lax.scan(chunk, w2_start, xs)
    outputs = jax.tree.map(join, outputs)
    terms = tuple(SlotTerms(*output[0]) for output in outputs)
    losses = tuple(
        jnp.sum(weights * (ce_weight * term.ce + l1_weight * term.l1)) for term in terms
    )
    if not with_gradient:
        return losses, terms, None
    gradients = tuple(
        _unpack(draft, output[1], w2_gradient)
        for draft, output, w2_gradient in zip(
            drafts, outputs, w2_gradients, strict=True
        )
    )
    return losses, terms, gradients


def _compare(logits, target_logits, target_norm, label, weight, ce_weight, l1_weight):
    """Per-slot terms and d(loss)/d(logits), all float32 [B, a, K, V]."""
    norm = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    p = jnp.exp(logits - norm)
    q = jnp.exp(target_logits - target_norm)
    difference = p - q
    sign = jnp.sign(difference)
    l1 = jnp.sum(jnp.abs(difference), axis=-1)
    mean_sign = jnp.sum(p * sign, axis=-1, keepdims=True)
    label_logit = jnp.take_along_axis(logits, label[..., None], axis=-1)[..., 0]
    ce = norm[..., 0] - label_logit
    index = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    one_hot = (index == label[..., None]).astype(jnp.float32)
    gradient = ce_weight * (p - one_hot) + l1_weight * p * (sign - mean_sign)
    return SlotTerms(ce, l1), weight[..., None] * gradient


def _rows(draft: DraftRows) -> jax.Array:
    if draft.feature is None:
        return draft.hidden
    return jnp.concatenate([draft.hidden, draft.feature], axis=-1)  # [B, A, K, D + R]


def _matrix(head: jax.Array, draft: DraftRows) -> jax.Array:
    # One product [hidden; feature] @ [head, W2] instead of two and a sum.
    dtype = draft.hidden.dtype
    if draft.w2 is None:
        return head.astype(dtype)
    return jnp.concatenate([head.astype(dtype), draft.w2.astype(dtype)], axis=-1)


def _unpack(
    draft: DraftRows, rows: jax.Array, w2_gradient: jax.Array | None
) -> DraftRows:
    if draft.w2 is None or w2_gradient is None:
        return DraftRows(hidden=rows, feature=None, w2=None)
    width = draft.hidden.shape[-1]
    return DraftRows(
        hidden=rows[..., :width],
        feature=rows[..., width:],
        w2=w2_gradient.astype(draft.w2.dtype),
    )


def _logits(rows: jax.Array, matrix: jax.Array) -> jax.Array:
    return _product(rows, matrix.astype(rows.dtype), rows.ndim - 1, 1)


def _product(
    left: jax.Array, right: jax.Array, left_axis: int, right_axis: int
) -> jax.Array:
    return jax.lax.dot_general(
        left,
        right,
        (((left_axis,), (right_axis,)), ((), ())),
        precision=layers.precision(left.dtype),
        preferred_element_type=jnp.float32,
    )


def _outer(gradient: jax.Array, feature: jax.Array) -> jax.Array:
    axes = tuple(range(gradient.ndim - 1))
    return jax.lax.dot_general(
        gradient,
        feature,
        ((axes, axes), ((), ())),
        precision=layers.precision(gradient.dtype),
        preferred_element_type=jnp.float32,
    )  # [V, R]


def _anchors_per_chunk(
    num_anchors: int, slots_per_anchor: int, chunk_slots: int
) -> int:
    """The largest divisor of num_anchors that keeps a chunk at or below chunk_slots."""
    fits = [
        count
        for count in range(1, num_anchors + 1)
        if num_anchors % count == 0 and count * slots_per_anchor <= chunk_slots
    ]
    return max(fits, default=1)
