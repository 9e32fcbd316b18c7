"""The drafters' losses on a batch: blocks, hidden states, then the vocabulary.

Previous tokens are those of the text (teacher forcing). Several drafters share the
blocks and the target's distributions; their losses do not mix.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dspark_jax import layers
from dspark_jax.config import DrafterConfig
from dspark_jax.drafters import backbone, confidence, dspark, markov
from dspark_jax.training import anchors as anchors_lib
from dspark_jax.training import losses, target_states
from dspark_jax.training.anchors import Anchors
from dspark_jax.training.settings import TrainConfig
from dspark_jax.training.target_states import Batch, TargetStates


class Outcome(NamedTuple):
    """One drafter's losses and metrics of one step.

    `metrics` holds (numerator, denominator) pairs, to be summed over steps first.
    """

    loss: jax.Array  # float32 []
    gradient_norm: jax.Array  # float32 [], before clipping
    metrics: dict[str, tuple[jax.Array, jax.Array]]


def evaluate(
    params: tuple[dspark.DSparkParams, ...],
    batch: Batch,
    states: TargetStates,
    anchors: Anchors,
    embed: Callable[[jax.Array], jax.Array],
    head: Float[Array, "V D"],
    ce: Float[Array, ""],
    *,
    drafters: tuple[DrafterConfig, ...],
    config: TrainConfig,
) -> tuple[Outcome, ...]:
    """Losses and metrics of every drafter on given anchors.

    Args:
      embed: the frozen embedding that drafters share with their target, ids -> rows.
      head: the frozen output matrix likewise (`losses.head_matrix`).
      ce: the weight of CE, float32, traced.
    """
    blocks = anchors_lib.make_blocks(
        batch.tokens,
        batch.loss_mask,
        anchors,
        block_size=drafters[0].block_size,
        mask_token=drafters[0].mask_token,
    )
    weights = losses.slot_weights(blocks.is_supervised, config.loss_decay)
    dtype = layers.dtype_of(drafters[0].compute_dtype)
    inputs = jax.lax.stop_gradient(embed(blocks.inputs).astype(dtype))
    drafts, confidences = [], []
    for drafter_params, drafter in zip(params, drafters, strict=True):
        rows, confidence_logits = draft_rows(
            drafter_params, drafter, blocks, anchors, states, inputs, config.tap_scale
        )
        drafts.append(rows)
        confidences.append(confidence_logits)
    vocabulary, terms = losses.vocabulary_loss(
        tuple(drafts),
        jax.lax.stop_gradient(head.astype(dtype)),
        anchors_lib.target_rows(states.hidden, blocks).astype(dtype),
        blocks.labels,
        weights / (jnp.sum(weights) + jnp.float32(losses.EPSILON)),
        ce,
        jnp.float32(config.l1_weight),
        chunk_slots=config.chunk_slots,
    )
    outcomes = []
    for loss, term, logits in zip(vocabulary, terms, confidences, strict=True):
        if logits is not None:
            bce = losses.confidence_loss(logits, losses.accept_rate(term.l1))
            mean = losses.weighted_mean(bce, weights)
            loss = loss + jnp.float32(config.confidence_weight) * mean
        found = losses.metrics(term, logits, blocks.is_supervised, weights)
        found = jax.lax.stop_gradient(found)
        outcomes.append(Outcome(loss, jnp.float32(0), found))
    return tuple(outcomes)


def draft_rows(
    params: dspark.DSparkParams,
    config: DrafterConfig,
    blocks: anchors_lib.Blocks,
    anchors: Anchors,
    states: TargetStates,
    inputs: Float[Array, "B A K D"],
    tap_scale: tuple[float, ...] = (),
) -> tuple[losses.DraftRows, jax.Array | None]:
    """One drafter's hidden states, Markov features and confidence logits of all slots.

    Args:
      inputs: embeddings of `blocks.inputs`.
      tap_scale: as in `TrainConfig`.
    """
    batch, length = states.hidden.shape[:2]
    taps = target_states.scale_taps(states.taps.astype(inputs.dtype), tap_scale)
    features = backbone.context_features(params.backbone, config, taps)
    positions = jnp.arange(length, dtype=jnp.int32)
    context = [
        (jnp.swapaxes(key, 1, 2), jnp.swapaxes(value, 1, 2))
        for key, value in backbone.context_keys_values(
            params.backbone,
            config,
            features,
            jnp.broadcast_to(positions[None], (batch, length)),
        )
    ]
    hidden = backbone.block_hidden(
        params.backbone,
        config,
        inputs,
        blocks.positions,
        context,
        anchors_lib.visible(anchors, length),
    )
    feature = embedding = w2 = None
    if params.markov is not None:
        embedding = markov.embedding(params.markov, config, blocks.previous)
        feature = markov.features(params.markov, config, hidden, embedding)
        w2 = params.markov.w2
    confidence_logits = None
    if params.confidence is not None:
        confidence_logits = confidence.logits(
            params.confidence, config, hidden, embedding
        )
    return losses.DraftRows(hidden, feature, w2), confidence_logits
