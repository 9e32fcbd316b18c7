"""The programs of a run: a step with the anchors it draws, and held-out evaluation.

Pure functions of arrays; `trainer.py` compiles them and feeds them.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from dspark_jax.config import DrafterConfig
from dspark_jax.training import anchors as anchors_lib
from dspark_jax.training import objective, target_states
from dspark_jax.training import step as step_lib
from dspark_jax.training.anchors import Anchors
from dspark_jax.training.objective import Outcome
from dspark_jax.training.settings import Recipe, TrainConfig
from dspark_jax.training.step import TrainState
from dspark_jax.training.target_states import Batch
from dspark_jax.types import PyTree, Target


class StepReport(NamedTuple):
    """What a step leaves behind besides the state."""

    outcomes: tuple[Outcome, ...]  # one a drafter
    anchors: jax.Array  # uint32 [], a checksum of the anchors


def step(
    key: jax.Array,
    state: TrainState,
    batch: Batch,
    target_params: PyTree,
    head: jax.Array,
    rate: jax.Array,
    ce: jax.Array,
    *,
    target: Target,
    drafters: tuple[DrafterConfig, ...],
    recipes: tuple[Recipe, ...],
    config: TrainConfig,
    mesh: Mesh,
    micro_steps: int,
    on_policy: bool,
) -> tuple[TrainState, StepReport]:
    """A step of all drafters on a batch [B, S], with the anchors it draws."""
    key = jax.random.fold_in(key, state.step)
    if micro_steps > 1:
        # Every micro-step takes rows from everywhere: each device keeps its own.
        batch = jax.tree.map(
            lambda x: jnp.swapaxes(
                x.reshape(x.shape[0] // micro_steps, micro_steps, *x.shape[1:]), 0, 1
            ),
            batch,
        )  # [U, B, S]
    if on_policy:
        batch = _fewer_rows(batch, config.num_anchors)
    anchors = _sample(key, batch, drafters[0], config, on_policy)
    state, outcomes = step_lib.train_step(
        key,
        state,
        batch,
        target_params,
        rate,
        ce,
        target=target,
        drafters=drafters,
        recipes=recipes,
        config=config,
        head=head,
        anchors=anchors,
        on_policy=on_policy,
        mesh=mesh,
    )
    return state, StepReport(outcomes, _checksum(anchors))


def evaluate(
    key: jax.Array,
    number: jax.Array,
    params: tuple,
    batch: Batch,
    target_params: PyTree,
    head: jax.Array,
    *,
    target: Target,
    drafters: tuple[DrafterConfig, ...],
    recipes: tuple[Recipe, ...],
    config: TrainConfig,
    mesh: Mesh,
) -> tuple[Outcome, ...]:
    """What every drafter loses on a batch, with the anchors of its `number`."""
    states = target_states.compute(
        target, target_params, batch, drafters[0].tap_layers, config.attention
    )
    key = jax.random.fold_in(key, number)
    return objective.evaluate(
        params,
        batch,
        states,
        anchors_lib.sample(key, batch.loss_mask, config.num_anchors),
        functools.partial(target.embed, target_params),
        head,
        jnp.asarray([recipe.loss.ce_weight for recipe in recipes], jnp.float32),
        drafters=drafters,
        recipes=recipes,
        config=config,
        mesh=mesh,
    )


def _fewer_rows(batch: Batch, num_anchors: int) -> Batch:
    """As many rows as have `num_anchors` blocks a row when all positions have one."""
    rows, length = batch.tokens.shape[-2:]
    count = max(rows * num_anchors // length, 1)
    return jax.tree.map(lambda x: x[..., :count, :], batch)


def _sample(
    key: jax.Array,
    batch: Batch,
    drafter: DrafterConfig,
    config: TrainConfig,
    on_policy: bool,
) -> Anchors:
    """The anchors of a batch [B, S], or of every part of one [U, B, S]."""

    def sample(key, mask):
        if on_policy:
            return anchors_lib.everywhere(mask)
        return step_lib.sample_anchors(key, mask, drafter, config)

    if batch.loss_mask.ndim == 2:
        return sample(key, batch.loss_mask)
    keys = jax.random.split(key, batch.loss_mask.shape[0])
    return jax.vmap(sample)(keys, batch.loss_mask)


def _checksum(anchors: Anchors) -> jax.Array:
    """A number that tells other anchors apart: values times odd weights, mod 2^32."""
    total = jnp.uint32(0)
    for number, leaf in enumerate(jax.tree.leaves(anchors)):
        values = leaf.astype(jnp.uint32).reshape(-1) + jnp.uint32(1)
        index = jnp.arange(values.shape[0], dtype=jnp.uint32)
        weights = (index * jnp.uint32(2654435761) + jnp.uint32(number)) | jnp.uint32(1)
        mixed = (values ^ (values << jnp.uint32(16))) * weights
        total = total * jnp.uint32(31) + jnp.sum(mixed, dtype=jnp.uint32)
    return total
