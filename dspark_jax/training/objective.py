"""The drafters' losses on a batch: blocks, hidden states, then the vocabulary.

Previous tokens are those of the text (teacher forcing). Several drafters share the
blocks and the target's distributions; their losses do not mix.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float

from dspark_jax import layers
from dspark_jax.config import DrafterConfig
from dspark_jax.drafters import backbone, confidence, dspark, markov
from dspark_jax.training import anchor_attention, losses, target_states, vocabulary
from dspark_jax.training import anchors as anchors_lib
from dspark_jax.training.anchors import Anchors
from dspark_jax.training.settings import LossConfig, Recipe, TrainConfig
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
    ce: Float[Array, "N"],
    *,
    drafters: tuple[DrafterConfig, ...],
    recipes: tuple[Recipe, ...],
    config: TrainConfig,
    on_policy: bool = False,
    mesh: Mesh | None = None,
) -> tuple[Outcome, ...]:
    """Losses and metrics of every drafter on given anchors.

    Args:
      embed: the frozen embedding that drafters share with their target, ids -> rows.
      head: the frozen output matrix likewise (`vocabulary.head_matrix`).
      ce: the weight of CE of every drafter, float32, traced.
      on_policy: `anchors` are `anchors.everywhere`, and a block weighs as much as it is
        likely to be one of the drafter's own rounds.
      mesh: over all of whose axes rows are spread; only attention by a kernel needs it.
    """
    blocks = anchors_lib.make_blocks(
        batch.tokens,
        batch.loss_mask,
        anchors,
        block_size=drafters[0].block_size,
        mask_token=drafters[0].mask_token,
    )
    dtype = layers.dtype_of(drafters[0].compute_dtype)
    inputs = jax.lax.stop_gradient(embed(blocks.inputs).astype(dtype))
    drafts, confidences = [], []
    for drafter_params, drafter, recipe in zip(params, drafters, recipes, strict=True):
        rows, confidence_logits = draft_rows(
            drafter_params,
            drafter,
            blocks,
            anchors,
            states,
            inputs,
            recipe=recipe,
            config=config,
            mesh=mesh,
        )
        drafts.append(rows)
        confidences.append(confidence_logits)
    head = jax.lax.stop_gradient(head.astype(dtype))
    target_rows = anchors_lib.target_rows(states.hidden, blocks).astype(dtype)
    starts: list[jax.Array | None] = [None] * len(drafters)
    if on_policy:
        now = vocabulary.slot_terms(
            tuple(drafts),
            head,
            target_rows,
            blocks.labels,
            chunk_logits=config.chunk_logits,
        )
        starts = [
            anchors_lib.round_starts(
                jnp.where(
                    blocks.is_supervised, jnp.exp(jnp.minimum(x.log_ratio, 0)), 0
                ),
                batch.loss_mask,
            )
            for x in now
        ]
    weights = tuple(
        losses.slot_weights(blocks.is_supervised, recipe.loss.decay)
        * (jnp.float32(1) if start is None else start[..., None])
        for recipe, start in zip(recipes, starts, strict=True)
    )
    epsilon = jnp.float32(losses.EPSILON)
    terms = tuple(
        _term_weights(recipe.loss, weight, jnp.sum(slots[..., 0]) + epsilon)
        for recipe, weight, slots in zip(recipes, ce, weights, strict=True)
    )
    totals, found_terms = vocabulary.loss(
        tuple(drafts),
        head,
        target_rows,
        blocks.labels,
        tuple(weight / (jnp.sum(weight) + epsilon) for weight in weights),
        terms,
        chunk_logits=config.chunk_logits,
    )
    outcomes = []
    for loss, term, logits, weight, recipe, start in zip(
        totals, found_terms, confidences, weights, recipes, starts, strict=True
    ):
        if logits is not None:
            bce = losses.confidence_loss(logits, losses.accept_rate(term.l1))
            mean = losses.weighted_mean(bce, weight)
            loss = loss + jnp.float32(recipe.loss.confidence_weight) * mean
        found = losses.metrics(term, logits, blocks.is_supervised, weight, start)
        found = jax.lax.stop_gradient(found)
        outcomes.append(Outcome(loss, jnp.float32(0), found))
    return tuple(outcomes)


def _term_weights(
    loss: LossConfig, ce: jax.Array, num_blocks: jax.Array
) -> losses.TermWeights:
    return losses.TermWeights(
        ce=ce,
        l1=jnp.float32(loss.l1_weight),
        kl=jnp.float32(loss.kl_weight) if loss.kl_weight else None,
        joint=jnp.float32(loss.joint_weight) / num_blocks
        if loss.joint_weight
        else None,
    )


def draft_rows(
    params: dspark.DSparkParams,
    drafter: DrafterConfig,
    blocks: anchors_lib.Blocks,
    anchors: Anchors,
    states: TargetStates,
    inputs: Float[Array, "B A K D"],
    *,
    recipe: Recipe,
    config: TrainConfig,
    mesh: Mesh | None = None,
) -> tuple[vocabulary.DraftRows, jax.Array | None]:
    """One drafter's hidden states, Markov features and confidence logits of all slots.

    Args:
      inputs: embeddings of `blocks.inputs`.
    """
    batch, length = states.hidden.shape[:2]
    taps = states.taps.astype(inputs.dtype)
    taps = target_states.scale_taps(taps, config.tap_scale)
    if recipe.trainable == "heads":
        body = jax.lax.stop_gradient(params.backbone)
        params = dataclasses.replace(params, backbone=body)
    features = backbone.context_features(params.backbone, drafter, taps)
    positions = jnp.arange(length, dtype=jnp.int32)
    context = [
        (jnp.swapaxes(key, 1, 2), jnp.swapaxes(value, 1, 2))
        for key, value in backbone.context_keys_values(
            params.backbone,
            drafter,
            features,
            jnp.broadcast_to(positions[None], (batch, length)),
        )
    ]
    hidden = backbone.block_hidden(
        params.backbone,
        drafter,
        inputs,
        blocks.positions,
        context,
        anchors_lib.visible(anchors, length),
        in_block=blocks.is_present,
        attention=anchor_attention.make(config.attention, drafter, anchors, mesh),
    )
    feature = embedding = w2 = None
    if params.markov is not None:
        embedding = markov.embedding(params.markov, drafter, blocks.previous)
        feature = markov.features(params.markov, drafter, hidden, embedding)
        w2 = params.markov.w2
    confidence_logits = None
    if params.confidence is not None:
        seen = (hidden, embedding)
        if recipe.loss.cut_confidence:
            seen = jax.lax.stop_gradient(seen)
        confidence_logits = confidence.logits(params.confidence, drafter, *seen)
    return vocabulary.DraftRows(hidden, feature, w2), confidence_logits
