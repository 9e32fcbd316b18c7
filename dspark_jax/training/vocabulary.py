"""The part of the loss that looks at the vocabulary, in chunks, with its own gradient.

Logits of all slots would be [A, K, V] float32 for every sequence: they are made,
compared and differentiated in chunks of anchors instead. The gradient with respect to
the logits is known in closed form,

  d/dx_v = w (a (p_v - [v = label]) + d (p_v - q_v)) + c_k p_v (s_v - sum_u p_u s_u),

with s = sign(p - q), c_k = w_k b + j g_k and g_k = half the derivative of the joint
term by slot k's acceptance (a block's slots lie in one chunk); a, b, d, j weigh CE, L1,
KL and the joint term (`losses`). So one pass gives the loss and the gradients of hidden
states and W2: nothing is kept, nothing is recomputed. `reference_terms` is the same
without chunks, for tests.
"""

import functools
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dspark_jax import layers, products
from dspark_jax.training.losses import (
    SlotTerms,
    TermWeights,
    accept_rate,
    expected_accepted,
)
from dspark_jax.types import PyTree, Target


class DraftRows(flax.struct.PyTreeNode):
    """What one drafter needs for its logits: head @ hidden + w2 @ feature."""

    hidden: jax.Array  # [B, A, K, D]
    feature: jax.Array | None  # [B, A, K, R]; None: no Markov head
    w2: jax.Array | None  # [V, R]


class ReferenceTerms(NamedTuple):
    """Everything about every slot, differentiable."""

    base_logits: jax.Array  # float32 [B, A, K, V]
    draft_logits: jax.Array  # float32 [B, A, K, V]
    target_logits: jax.Array  # float32 [B, A, K, V], aligned with the labels
    ce: jax.Array  # float32 [B, A, K]
    l1: jax.Array  # float32 [B, A, K]
    log_ratio: jax.Array  # float32 [B, A, K], as in SlotTerms
    kl: jax.Array  # float32 [B, A, K], of the target's distribution to the draft's


def loss(
    drafts: tuple[DraftRows, ...],
    head: Float[Array, "V D"],
    target_hidden: Float[Array, "B A K D"],
    labels: Int[Array, "B A K"],
    weights: tuple[Float[Array, "B A K"], ...],
    terms: tuple[TermWeights, ...],
    *,
    chunk_logits: int = 2**28,
) -> tuple[tuple[jax.Array, ...], tuple[SlotTerms, ...]]:
    """The part of each drafter's loss that looks at the vocabulary, chunk by chunk.

    The target's distribution is made once per chunk for all drafters. Gradients flow to
    the drafts only (`head` is frozen).

    Args:
      head: the frozen output matrix, of target and drafters alike (`head_matrix`).
      target_hidden: the target's states that predict the labels.
      weights: w / (sum w + 1e-6) of every drafter, 0 on unsupervised slots.
      terms: what each drafter's loss is made of, traced.
      chunk_logits: how many float32 logits one drafter may have at one time; chunks are
        groups of anchors over the whole batch, so that a sharded batch stays where it
        is, and at least one anchor a sequence.

    Returns:
      sum w (a CE + b L1 + d KL) + j joint per drafter, and the per-slot terms without
      gradient.
    """
    losses, found = _loss(
        chunk_logits, drafts, head, target_hidden, labels, weights, terms
    )
    return losses, jax.lax.stop_gradient(found)


def slot_terms(
    drafts: tuple[DraftRows, ...],
    head: Float[Array, "V D"],
    target_hidden: Float[Array, "B A K D"],
    labels: Int[Array, "B A K"],
    *,
    chunk_logits: int = 2**28,
) -> tuple[SlotTerms, ...]:
    """The per-slot terms of every drafter, without gradients."""
    count = len(drafts)
    weights = (jnp.zeros(labels.shape, jnp.float32),) * count
    parts = (TermWeights(jnp.float32(0), jnp.float32(0)),) * count
    arguments = drafts, head, target_hidden, labels, weights, parts
    arguments = jax.lax.stop_gradient(arguments)
    return _run_chunks(chunk_logits, False, *arguments)[1]


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
    q, log_q = jax.nn.softmax(target, axis=-1), jax.nn.log_softmax(target, axis=-1)
    distance = jnp.sum(jnp.abs(jax.nn.softmax(logits, axis=-1) - q), axis=-1)
    log_ratio = -ce - jnp.take_along_axis(log_q, labels[..., None], axis=-1)[..., 0]
    kl = jnp.sum(q * (log_q - log_p), axis=-1)
    return ReferenceTerms(base, logits, target, ce, distance, log_ratio, kl)


def head_matrix(target: Target, target_params: PyTree) -> Float[Array, "V D"]:
    """The target's output matrix, cropped to the true vocabulary.

    A target's head is only known as a linear function: it is applied to the basis.
    """
    width = target.config.width
    dtype = layers.dtype_of(getattr(target.config, "compute_dtype", "float32"))
    columns = target.unembed(target_params, jnp.eye(width, dtype=dtype))  # [D, V]
    return columns.T.astype(dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss(chunk_logits, *arguments):
    return _run_chunks(chunk_logits, False, *arguments)[:2]


def _forward(chunk_logits, *arguments):
    losses, terms, gradients = _run_chunks(chunk_logits, True, *arguments)
    return (losses, terms), (gradients, arguments)


def _backward(chunk_logits, saved, cotangents):
    gradients, (_, head, target_hidden, _, weights, terms) = saved
    drafts = tuple(
        jax.tree.map(lambda x, scale=scale: x * scale.astype(x.dtype), gradient)
        for gradient, scale in zip(gradients, cotangents[0], strict=True)
    )
    # Frozen or constant: zeros that nobody reads are removed by the compiler.
    head, target_hidden, weights, terms = jax.tree.map(
        jnp.zeros_like, (head, target_hidden, weights, terms)
    )
    return drafts, head, target_hidden, None, weights, terms


_loss.defvjp(_forward, _backward)


def _run_chunks(
    chunk_logits,
    with_gradient,
    drafts,
    head,
    target_hidden,
    labels,
    weights,
    term_weights,
):
    batch, num_anchors, block_size = labels.shape
    logits_per_anchor = batch * block_size * head.shape[0]
    per_chunk = _anchors_per_chunk(num_anchors, logits_per_anchor, chunk_logits)
    matrices = tuple(_matrix(head, draft) for draft in drafts)

    def split(x):  # [B, A, ...] -> [chunks, B, anchors of a chunk, ...]
        x = x.reshape(batch, num_anchors // per_chunk, per_chunk, *x.shape[2:])
        return jnp.moveaxis(x, 1, 0)

    def join(x):
        x = jnp.moveaxis(x, 0, 1)
        return x.reshape(batch, num_anchors, *x.shape[3:])

    def chunk(w2_gradients, rows):
        inputs, target_rows, label, row_weights = rows
        target_logits = _logits(target_rows, head)
        target_norm = jax.nn.logsumexp(target_logits, axis=-1, keepdims=True)
        outputs, accumulated = [], []
        for row, matrix, w2_gradient, weight, parts in zip(
            inputs, matrices, w2_gradients, row_weights, term_weights, strict=True
        ):
            terms, gradient = _compare(
                _logits(row, matrix), target_logits, target_norm, label, weight, parts
            )
            row_gradient = None
            if with_gradient:
                gradient = gradient.astype(row.dtype)
                row_gradient = products.contract(gradient, matrix, (3,), (0,))
                row_gradient = row_gradient.astype(row.dtype)
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
        _total(term, weight, parts)
        for term, weight, parts in zip(terms, weights, term_weights, strict=True)
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


def _compare(logits, target_logits, target_norm, label, weight, parts):
    """Per-slot terms and d(loss)/d(logits), all float32 [B, a, K, V]."""
    norm = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    p = jnp.exp(logits - norm)
    q = jnp.exp(target_logits - target_norm)
    difference = p - q
    sign = jnp.sign(difference)
    l1 = jnp.sum(jnp.abs(difference), axis=-1)
    mean_sign = jnp.sum(p * sign, axis=-1, keepdims=True)
    ce = norm[..., 0] - _label_logit(logits, label)
    log_ratio = -ce - (_label_logit(target_logits, label) - target_norm[..., 0])
    index = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    one_hot = (index == label[..., None]).astype(jnp.float32)
    l1_factor = weight * parts.l1
    if parts.joint is not None:
        l1_factor = l1_factor + parts.joint * _joint_factor(l1, weight > 0)
    gradient = (weight * parts.ce)[..., None] * (p - one_hot)
    gradient = gradient + l1_factor[..., None] * p * (sign - mean_sign)
    kl = None
    if parts.kl is not None:
        difference_in_nats = (target_logits - target_norm) - (logits - norm)
        kl = jnp.sum(q * difference_in_nats, axis=-1)
        gradient = gradient + (weight * parts.kl)[..., None] * difference
    return SlotTerms(ce, l1, log_ratio, kl), gradient


def _label_logit(logits: jax.Array, label: jax.Array) -> jax.Array:
    return jnp.take_along_axis(logits, label[..., None], axis=-1)[..., 0]


def _total(term: SlotTerms, weight: jax.Array, parts: TermWeights) -> jax.Array:
    slots = parts.ce * term.ce + parts.l1 * term.l1
    if parts.kl is not None and term.kl is not None:
        slots = slots + parts.kl * term.kl
    total = jnp.sum(weight * slots)
    if parts.joint is not None:
        accept = accept_rate(term.l1) * (weight > 0).astype(jnp.float32)
        total = total - parts.joint * jnp.sum(expected_accepted(accept))
    return total


def _joint_factor(l1: jax.Array, is_supervised: jax.Array) -> jax.Array:
    """d(-sum_k prod_{i<=k} a_i) / d(l1_j) = sum_{k>=j} prod_{i<=k, i != j} a_i / 2."""
    accept = accept_rate(l1) * is_supervised.astype(jnp.float32)
    ahead = jnp.ones_like(accept[..., 0])
    factors = []
    for slot in reversed(range(accept.shape[-1])):
        # ahead = 1 + a_{j+1} (1 + a_{j+2} (...)): what follows slot j, itself left out.
        factors.append(ahead)
        ahead = 1 + accept[..., slot] * ahead
    survival = jnp.cumprod(accept, axis=-1)
    before = jnp.concatenate(
        [jnp.ones_like(survival[..., :1]), survival[..., :-1]], axis=-1
    )
    found = before * jnp.stack(factors[::-1], axis=-1) / 2
    return jnp.where(is_supervised, found, 0.0)


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
    return products.contract(rows, matrix.astype(rows.dtype), (rows.ndim - 1,), (1,))


def _outer(gradient: jax.Array, feature: jax.Array) -> jax.Array:
    axes = tuple(range(gradient.ndim - 1))
    return products.contract(gradient, feature, axes, axes)  # [V, R]


def _anchors_per_chunk(num_anchors: int, logits_per_anchor: int, limit: int) -> int:
    """The largest divisor of num_anchors whose logits stay within the limit, or 1."""
    fits = [
        count
        for count in range(1, num_anchors + 1)
        if num_anchors % count == 0 and count * logits_per_anchor <= limit
    ]
    return max(fits, default=1)
