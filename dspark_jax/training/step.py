"""One training step: target states, anchors, drafters, losses, AdamW.

`train_step` is pure and not jitted; the outermost caller jits it and donates the state.
Several drafters of one block size may train at once: they share the target's pass, the
anchors and the target's distributions, and each has its own loss, clipping and optimiser
(their gradients do not mix). Master weights and optimiser are float32; products run in
the configs' `compute_dtype`.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from dspark_jax import layers
from dspark_jax.config import DrafterConfig
from dspark_jax.drafters import backbone, confidence, dspark, markov
from dspark_jax.training import anchors as anchors_lib
from dspark_jax.training import losses
from dspark_jax.training.anchors import Anchors
from dspark_jax.types import PyTree, Target


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How to train; static under jit.

    Attributes:
      num_anchors: blocks per sequence and micro-step (A).
      warmup_share: int(share * total steps) steps of linear warm-up.
      clip_norm: largest norm of one drafter's gradient.
      ce_weight, l1_weight, confidence_weight: the loss's three weights.
      loss_decay: slot k weighs exp(-k / loss_decay); None weighs all alike.
      ce_start_share, ce_start_weight: during this first share of the steps CE weighs
        `ce_start_weight` instead (L1 has no gradient while p and q do not overlap).
      tap_scale: a factor per tapped layer, () for none. Their norms differ by an order
        of magnitude; `fold_tap_scale` moves the factors into fc afterwards.
      chunk_slots: about how many slots have logits at one time.
      attention: of the target's pass: "xla", or "cudnn" on a GPU in bfloat16.
    """

    num_anchors: int = 64
    learning_rate: float = 6e-4
    warmup_share: float = 0.04
    clip_norm: float = 1.0
    beta1: float = 0.9
    beta2: float = 0.999
    adam_epsilon: float = 1e-8
    weight_decay: float = 0.0
    ce_weight: float = 0.1
    l1_weight: float = 0.9
    confidence_weight: float = 1.0
    loss_decay: float | None = 4.0
    ce_start_share: float = 0.0
    ce_start_weight: float = 1.0
    tap_scale: tuple[float, ...] = ()
    chunk_slots: int = 4096
    attention: str = "xla"

    def __post_init__(self):
        for name in ("num_anchors", "learning_rate", "clip_norm", "chunk_slots"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        for name in ("warmup_share", "ce_start_share"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(
                    f"{name} must lie in [0, 1), got {getattr(self, name)}"
                )
        if self.loss_decay is not None and self.loss_decay <= 0:
            raise ValueError(
                f"loss_decay must be positive or absent, got {self.loss_decay}"
            )
        if self.attention not in ("xla", "cudnn"):
            raise ValueError(
                f"attention must be one of ('xla', 'cudnn'), got {self.attention!r}"
            )


@flax.struct.dataclass
class Batch:
    """Texts; one conversation a row. A leading axis [U] makes U micro-steps of them."""

    tokens: jax.Array  # int32 [B, S]
    loss_mask: jax.Array  # bool [B, S], tokens that the target wrote


@flax.struct.dataclass
class TargetStates:
    """What the target makes of a batch; from its pass, or from a cache."""

    taps: jax.Array  # [B, S, M*D], raw layer outputs
    hidden: jax.Array  # [B, S, D], after the final norm


@flax.struct.dataclass
class TrainState:
    """Everything that a step changes."""

    step: jax.Array  # int32 []
    params: tuple[dspark.DSparkParams, ...]  # float32, one a drafter
    optimizer: tuple[Any, ...]


class Frozen(NamedTuple):
    """The parameters that drafters share with their target and never train."""

    embed: jax.Array  # [V, D] or None: the target's own `embed` is called
    head: jax.Array  # [V, D]


class Outcome(NamedTuple):
    """One drafter's losses and metrics of one step.

    `metrics` holds (numerator, denominator) pairs, to be summed over steps first.
    """

    loss: jax.Array  # float32 []
    gradient_norm: jax.Array  # float32 [], before clipping
    metrics: dict[str, tuple[jax.Array, jax.Array]]


def init_params(
    key: jax.Array, config: DrafterConfig, final_norm: jax.Array | None = None
) -> dspark.DSparkParams:
    """Float32 parameters N(0, 0.02²); the last norm starts from the target's, if given.

    The drafter's hidden states go through the target's head: starting from the target's
    gain puts the logits on the right scale.
    """
    params = dspark.init(key, dataclasses.replace(config, param_dtype="float32"))
    if final_norm is None:
        return params
    # A copy: a donated state must not take the target's own array with it.
    gain = jnp.array(final_norm, jnp.float32, copy=True)
    return params.replace(backbone=params.backbone.replace(final_norm=gain))


def init_state(
    params: tuple[dspark.DSparkParams, ...], config: TrainConfig
) -> TrainState:
    """Step 0 of training these parameters."""
    optimizer = make_optimizer(config)
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        optimizer=tuple(optimizer.init(p) for p in params),
    )


def make_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """Clipping and AdamW without the learning rate, which `train_step` is given."""
    return optax.chain(
        clip_by_global_norm(config.clip_norm),
        optax.scale_by_adam(config.beta1, config.beta2, config.adam_epsilon),
        optax.add_decayed_weights(config.weight_decay),
    )


def clip_by_global_norm(max_norm: float) -> optax.GradientTransformation:
    """Scales updates by min(1, max_norm / (norm + 1e-6)), as torch does."""

    def init(params):
        del params
        return optax.EmptyState()

    def update(updates, state, params=None):
        del params
        factor = max_norm / (global_norm(updates) + 1e-6)
        factor = jnp.minimum(1.0, factor)
        return jax.tree.map(lambda x: x * factor.astype(x.dtype), updates), state

    return optax.GradientTransformation(init, update)


def global_norm(tree: PyTree) -> Float[Array, ""]:
    """Euclidean norm over all arrays, float32."""
    squares = [
        jnp.sum(jnp.square(x.astype(jnp.float32))) for x in jax.tree.leaves(tree)
    ]
    return jnp.sqrt(sum(squares, jnp.float32(0)))


def learning_rate(step: int, total_steps: int, config: TrainConfig) -> float:
    """Linear warm-up to `learning_rate`, then a cosine to 0; step is 0-based, on the host.

    With W = int(warmup_share * total): (step + 1) / W, then (1 + cos(pi n / M)) / 2 for
    n = step - W of M = total - W. (DeepSpec's own schedule is this cosine times
    2 / (1 + cos(pi / M)), an accident of torch: 1e-6 at M = 1500.)
    """
    warmup = int(config.warmup_share * total_steps)
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(total_steps - warmup, 1)
    return config.learning_rate * (1 + math.cos(math.pi * min(progress, 1.0))) / 2


def ce_weight(step: int, total_steps: int, config: TrainConfig) -> float:
    """The weight of CE at this step."""
    if step < int(config.ce_start_share * total_steps):
        return config.ce_start_weight
    return config.ce_weight


def train_step(
    key: jax.Array,
    state: TrainState,
    batch: Batch,
    target_params: PyTree,
    rate: Float[Array, ""],
    ce: Float[Array, ""] | None = None,
    *,
    target: Target,
    drafters: tuple[DrafterConfig, ...],
    config: TrainConfig,
    anchors: Anchors | None = None,
    states: TargetStates | None = None,
    frozen: Frozen | None = None,
) -> tuple[TrainState, tuple[Outcome, ...]]:
    """One optimiser step of every drafter; donate `state`.

    Data parallelism is a matter of annotations: with a batch sharded over a mesh and a
    replicated state, all sums are global (one denominator for all devices).

    Args:
      key: one typed key; draws the anchors.
      batch: tokens [B, S], or [U, B, S] for U micro-steps that are averaged equally.
      target_params: of `target`; not differentiated.
      rate, ce: learning rate and CE weight of this step, float32 scalars, traced.
      anchors, states, frozen: given instead of sampled or computed ([U, ...] as well).

    Raises:
      ValueError: drafters that cannot share a pass.
    """
    _check_drafters(drafters)
    if frozen is None:
        frozen = Frozen(None, losses.head_matrix(target, target_params))
    if ce is None:
        ce = jnp.float32(config.ce_weight)

    def micro_step(key, batch, anchors, states):
        if states is None:
            states = target_states(target, target_params, batch, drafters, config)
        if anchors is None:
            anchors = anchors_lib.sample(key, batch.loss_mask, config.num_anchors)
        return gradients(
            state.params,
            batch,
            states,
            anchors,
            target,
            target_params,
            frozen,
            ce,
            drafters=drafters,
            config=config,
        )

    if batch.tokens.ndim == 2:
        grads, outcomes = micro_step(key, batch, anchors, states)
    else:
        count = batch.tokens.shape[0]

        def accumulate(total, inputs):
            found = micro_step(*inputs)
            return jax.tree.map(jnp.add, total, found), None

        inputs = (jax.random.split(key, count), batch, anchors, states)
        shapes = jax.eval_shape(micro_step, *jax.tree.map(lambda x: x[0], inputs))
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        (grads, outcomes), _ = jax.lax.scan(accumulate, zeros, inputs)
        grads = jax.tree.map(lambda x: x / count, grads)
        outcomes = tuple(o._replace(loss=o.loss / count) for o in outcomes)
    outcomes = tuple(
        outcome._replace(gradient_norm=global_norm(gradient))
        for outcome, gradient in zip(outcomes, grads, strict=True)
    )
    return apply_gradients(state, grads, rate, config), outcomes


def apply_gradients(
    state: TrainState,
    grads: tuple[dspark.DSparkParams, ...],
    rate: Float[Array, ""],
    config: TrainConfig,
) -> TrainState:
    """Clips each drafter's gradient and takes an AdamW step."""
    optimizer = make_optimizer(config)
    new_params, new_optimizer = [], []
    for params, gradient, slots in zip(
        state.params, grads, state.optimizer, strict=True
    ):
        # optax raises a float to an int32 count: refused under strict promotion.
        with jax.numpy_dtype_promotion("standard"):
            updates, slots = optimizer.update(gradient, slots, params)
        new_params.append(jax.tree.map(lambda p, u: p - rate * u, params, updates))
        new_optimizer.append(slots)
    return TrainState(
        step=state.step + 1, params=tuple(new_params), optimizer=tuple(new_optimizer)
    )


def gradients(
    params: tuple[dspark.DSparkParams, ...],
    batch: Batch,
    states: TargetStates,
    anchors: Anchors,
    target: Target,
    target_params: PyTree,
    frozen: Frozen,
    ce: Float[Array, ""],
    *,
    drafters: tuple[DrafterConfig, ...],
    config: TrainConfig,
) -> tuple[tuple[dspark.DSparkParams, ...], tuple[Outcome, ...]]:
    """Gradients of every drafter's own loss, and the losses."""

    def total(params):
        outcomes = evaluate(
            params,
            batch,
            states,
            anchors,
            target,
            target_params,
            frozen,
            ce,
            drafters=drafters,
            config=config,
        )
        return sum(outcome.loss for outcome in outcomes), outcomes

    return jax.grad(total, has_aux=True)(params)


def evaluate(
    params: tuple[dspark.DSparkParams, ...],
    batch: Batch,
    states: TargetStates,
    anchors: Anchors,
    target: Target,
    target_params: PyTree,
    frozen: Frozen,
    ce: Float[Array, ""],
    *,
    drafters: tuple[DrafterConfig, ...],
    config: TrainConfig,
) -> tuple[Outcome, ...]:
    """Losses and metrics of every drafter on given anchors."""
    blocks = anchors_lib.make_blocks(
        batch.tokens,
        batch.loss_mask,
        anchors,
        block_size=drafters[0].block_size,
        mask_token=drafters[0].mask_token,
    )
    weights = losses.slot_weights(blocks.is_supervised, config.loss_decay)
    drafts, confidences = [], []
    for drafter_params, drafter in zip(params, drafters, strict=True):
        rows, confidence_logits = draft_rows(
            drafter_params,
            drafter,
            blocks,
            anchors,
            states,
            target,
            target_params,
            frozen,
            config.tap_scale,
        )
        drafts.append(rows)
        confidences.append(confidence_logits)
    dtype = layers.dtype_of(drafters[0].compute_dtype)
    vocabulary, terms = losses.vocabulary_loss(
        tuple(drafts),
        jax.lax.stop_gradient(frozen.head.astype(dtype)),
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
    target: Target,
    target_params: PyTree,
    frozen: Frozen,
    tap_scale: tuple[float, ...] = (),
) -> tuple[losses.DraftRows, jax.Array | None]:
    """One drafter's hidden states, Markov features and confidence logits of all slots.

    Previous tokens are those of the text (teacher forcing).
    """
    dtype = layers.dtype_of(config.compute_dtype)
    batch, length = states.hidden.shape[:2]
    if frozen.embed is None:
        inputs = target.embed(target_params, blocks.inputs).astype(dtype)
    else:
        inputs = layers.embed(frozen.embed, blocks.inputs, dtype)
    taps = scale_taps(states.taps.astype(dtype), tap_scale)
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
        jax.lax.stop_gradient(inputs),
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


def target_states(
    target: Target,
    target_params: PyTree,
    batch: Batch,
    drafters: tuple[DrafterConfig, ...],
    config: TrainConfig,
) -> TargetStates:
    """Runs the target over whole rows, without storing keys and values."""
    rows, length = batch.tokens.shape
    positions = jnp.broadcast_to(
        jnp.arange(length, dtype=jnp.int32)[None], (rows, length)
    )
    hidden, taps, _ = target.forward(
        target_params,
        batch.tokens,
        positions,
        WholeRows(config.attention),
        tap_layers=drafters[0].tap_layers,
    )
    return jax.lax.stop_gradient(TargetStates(taps=taps, hidden=hidden))


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class WholeRows:
    """A cache that keeps nothing: every row is there at once, position = index."""

    implementation: str = "xla"

    def attend(self, layer, query, key, value, positions):
        """Causal attention among the given rows."""
        del layer, positions
        if self.implementation == "cudnn":
            out = jax.nn.dot_product_attention(
                query, key, value, is_causal=True, implementation="cudnn"
            )
            return out, self
        length = query.shape[1]
        index = jnp.arange(length, dtype=jnp.int32)
        seen = index[None, :] <= index[:, None]  # [S, S]
        segment = (jnp.swapaxes(key, 1, 2), jnp.swapaxes(value, 1, 2), seen[None, None])
        return layers.grouped_attention(query[:, None], [segment])[:, 0], self


def measure_tap_scale(states: TargetStates, num_taps: int) -> tuple[float, ...]:
    """About 1 / rms of every tapped layer, without position 0 (its norm is an outlier).

    Rounded to powers of two: scaling is then exact in every dtype, and so is
    `fold_tap_scale`. Reads the values: for the host, not under a trace.
    """
    taps = states.taps[:, 1:].astype(jnp.float32)
    taps = taps.reshape(*taps.shape[:-1], num_taps, -1)
    scale = jax.lax.rsqrt(jnp.mean(taps * taps, axis=(0, 1, 3)))
    return tuple(float(x) for x in 2.0 ** np.round(np.log2(np.asarray(scale))))


def scale_taps(taps: Float[Array, "... MD"], tap_scale: tuple[float, ...]) -> jax.Array:
    """Multiplies each tapped layer by its factor."""
    if not tap_scale:
        return taps
    return taps * _tap_factors(tap_scale, taps.shape[-1], taps.dtype).reshape(
        *[1] * (taps.ndim - 1), -1
    )


def fold_tap_scale(
    params: dspark.DSparkParams, tap_scale: tuple[float, ...]
) -> dspark.DSparkParams:
    """The same function of the raw taps: the factors moved into the columns of fc."""
    if not tap_scale:
        return params
    fc = params.backbone.fc
    factors = _tap_factors(tap_scale, fc.shape[1], fc.dtype)
    return params.replace(backbone=params.backbone.replace(fc=fc * factors[None]))


def _tap_factors(tap_scale: tuple[float, ...], size: int, dtype: Any) -> jax.Array:
    if size % len(tap_scale):
        raise ValueError(
            f"`tap_scale` must have one factor a tapped layer, got {len(tap_scale)} for "
            f"{size} features"
        )
    return jnp.repeat(jnp.asarray(tap_scale, dtype), size // len(tap_scale))


def _check_drafters(drafters: tuple[DrafterConfig, ...]) -> None:
    first = drafters[0]
    for drafter in drafters[1:]:
        for name in ("block_size", "mask_token", "tap_layers", "compute_dtype"):
            if getattr(drafter, name) != getattr(first, name):
                raise ValueError(
                    f"drafters trained together must have one {name}, got "
                    f"{getattr(first, name)} and {getattr(drafter, name)}"
                )
