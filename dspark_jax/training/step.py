"""One training step: target states, anchors, drafters, losses, AdamW.

`train_step` is pure and not jitted; the outermost caller jits it and donates the state.
Several drafters of one block size may train at once: they share the target's pass, the
anchors and the target's distributions; each has its own loss, clipping and optimiser.
Master weights and optimiser are float32; products run in the configs' `compute_dtype`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float

from dspark_jax.config import DrafterConfig
from dspark_jax.drafters import dspark
from dspark_jax.training import anchors as anchors_lib
from dspark_jax.training import objective, vocabulary
from dspark_jax.training import target_states as target_states_lib
from dspark_jax.training.anchors import Anchors
from dspark_jax.training.objective import Outcome
from dspark_jax.training.settings import Recipe, TrainConfig
from dspark_jax.training.target_states import Batch, TargetStates
from dspark_jax.types import PyTree, Target


class TrainState(flax.struct.PyTreeNode):
    """Everything that a step changes."""

    step: jax.Array  # int32 []
    params: tuple[dspark.DSparkParams, ...]  # float32, one a drafter
    optimizer: tuple[Any, ...]


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
    body = dataclasses.replace(params.backbone, final_norm=gain)
    return dataclasses.replace(params, backbone=body)


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


def train_step(
    key: jax.Array,
    state: TrainState,
    batch: Batch,
    target_params: PyTree,
    rate: Float[Array, ""],
    ce: Float[Array, "N"] | None = None,
    *,
    target: Target,
    drafters: tuple[DrafterConfig, ...],
    config: TrainConfig,
    recipes: tuple[Recipe, ...] | None = None,
    head: Float[Array, "V D"] | None = None,
    anchors: Anchors | None = None,
    states: TargetStates | None = None,
    on_policy: bool = False,
    mesh: Mesh | None = None,
) -> tuple[TrainState, tuple[Outcome, ...]]:
    """One optimiser step of every drafter; donate `state`.

    Data parallelism is a matter of annotations: with a batch sharded over a mesh and a
    replicated state, all sums are global (one denominator for all devices).

    Args:
      key: one typed key; draws the anchors.
      batch: tokens [B, S], or [U, B, S] for U micro-steps that are averaged equally.
      target_params: of `target`; not differentiated.
      rate: learning rate of this step, float32, traced.
      ce: every drafter's CE weight in this step, float32, traced; None: the loss's own.
      recipes: one a drafter; None: all have `config.loss`.
      head: `vocabulary.head_matrix` of the target, to save making it every step.
      anchors, states: given instead of sampled and computed ([U, ...] as well): blocks
        of one's own, or the target's states from a cache.
      on_policy: a block at every position, weighted by the chance that one of the
        drafter's own rounds begins there; `num_anchors` is not used. Costs as much as
        S anchors a sequence: give it fewer sequences.
      mesh: over all of whose axes rows are spread, if they are: kernels run on every
        device for its own rows. None on a machine of several devices: "auto" takes no
        kernel that can't be partitioned.

    Raises:
      ValueError: drafters that cannot share a pass.
      NotImplementedError: `config.attention` names what can't run their blocks.
    """
    _check_drafters(drafters)
    if head is None:
        head = vocabulary.head_matrix(target, target_params)
    embed = functools.partial(target.embed, target_params)
    if recipes is None:
        recipes = (Recipe(loss=config.loss),) * len(drafters)
    if ce is None:
        ce = jnp.asarray([recipe.loss.ce_weight for recipe in recipes], jnp.float32)

    def micro_step(key, batch, anchors, states):
        if states is None:
            states = target_states_lib.compute(
                target,
                target_params,
                batch,
                drafters[0].tap_layers,
                config.attention,
            )
        if anchors is None:
            if on_policy:
                anchors = anchors_lib.everywhere(batch.loss_mask)
            else:
                anchors = sample_anchors(key, batch.loss_mask, drafters[0], config)
        return gradients(
            state.params,
            batch,
            states,
            anchors,
            embed,
            head,
            ce,
            drafters=drafters,
            recipes=recipes,
            config=config,
            on_policy=on_policy,
            mesh=mesh,
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


def sample_anchors(
    key: jax.Array,
    loss_mask: Bool[Array, "B S"],
    drafter: DrafterConfig,
    config: TrainConfig,
) -> Anchors:
    """The anchors of one micro-step, whole blocks or of random lengths."""
    sizes = (config.min_block, drafter.block_size) if config.min_block else None
    return anchors_lib.sample(key, loss_mask, config.num_anchors, sizes=sizes)


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
    embed: Callable[[jax.Array], jax.Array],
    head: Float[Array, "V D"],
    ce: Float[Array, "N"],
    *,
    drafters: tuple[DrafterConfig, ...],
    recipes: tuple[Recipe, ...],
    config: TrainConfig,
    on_policy: bool = False,
    mesh: Mesh | None = None,
) -> tuple[tuple[dspark.DSparkParams, ...], tuple[Outcome, ...]]:
    """Gradients of every drafter's own loss, and what `objective.evaluate` gives."""
    evaluate = functools.partial(
        objective.evaluate,
        drafters=drafters,
        recipes=recipes,
        config=config,
        on_policy=on_policy,
        mesh=mesh,
    )

    def total(params: tuple[dspark.DSparkParams, ...]) -> tuple[jax.Array, tuple]:
        outcomes = evaluate(params, batch, states, anchors, embed, head, ce)
        return sum((o.loss for o in outcomes), jnp.float32(0)), outcomes

    return jax.grad(total, has_aux=True)(params)


def _check_drafters(drafters: tuple[DrafterConfig, ...]) -> None:
    first = drafters[0]
    for drafter in drafters[1:]:
        for name in ("block_size", "mask_token", "tap_layers", "compute_dtype"):
            if getattr(drafter, name) != getattr(first, name):
                raise ValueError(
                    f"drafters trained together must have one {name}, got "
                    f"{getattr(first, name)} and {getattr(drafter, name)}"
                )
