"""Training steps: DeepSpec's optimiser runs, several devices, joint training."""

import dataclasses
import functools
import json

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from dspark_jax.training import anchors as anchors_lib
from dspark_jax.training import settings, step, target_states

pytestmark = pytest.mark.usefixtures("quick_compilation")

GRADIENT = {"atol": 2e-6, "rtol": 1e-3}


@pytest.mark.parametrize("name", ["dspark_vanilla_b7", "dspark_rnn_b4"])
def test_optimizer_equals_deepspec(load_case, golden, name):
    """AdamW, clipping and accumulation over several steps of given anchors."""
    case = load_case(name)
    about = json.loads((golden / "optimizer" / f"{name}.json").read_text())
    found = safetensors.numpy.load_file(golden / "optimizer" / f"{name}.safetensors")
    train_config = case.train_config(
        clip_norm=about["max_grad_norm"],
        beta1=about["betas"][0],
        beta2=about["betas"][1],
        weight_decay=about["weight_decay"],
    )
    accumulation = about.get("accumulation", 1)

    def split(x):  # micro-batch i is row i alone
        return x if accumulation == 1 else x[:, None]

    @jax.jit
    def run(state, anchors, rate):
        return step.train_step(
            jax.random.key(0),
            state,
            jax.tree.map(split, case.batch),
            None,
            rate,
            target=case.target,
            drafters=(case.config,),
            config=train_config,
            head=case.head,
            states=jax.tree.map(split, case.states),
            anchors=jax.tree.map(split, anchors),
        )

    state = step.init_state((case.params,), train_config)
    for index, rate in enumerate(about["lr_used"]):
        anchors = anchors_lib.Anchors(
            positions=jnp.asarray(found["anchor_positions"][index]),
            keep=jnp.asarray(found["block_keep_mask"][index] > 0),
        )
        state, (outcome,) = run(state, anchors, jnp.float32(rate))
        expected = np.mean(about["losses"][index])
        np.testing.assert_allclose(outcome.loss, expected, rtol=1e-4)
        norm = about["grad_norm_before_clip"][index]
        np.testing.assert_allclose(outcome.gradient_norm, norm, rtol=1e-3)
        stage = {0: "after_step1/", len(about["lr_used"]) - 1: "final/"}.get(index)
        if stage is not None:
            ours = case.named(state.params[0])
            for key in (k for k in found if k.startswith(stage)):
                np.testing.assert_allclose(
                    ours[key.removeprefix(stage)], found[key], atol=2e-5, err_msg=key
                )
    assert int(state.step) == len(about["lr_used"])


def test_two_devices_equal_two_ranks(load_case, golden):
    """Rows sharded over a mesh: the gradient of two processes, and of one."""
    case = load_case("dspark_vanilla_b7")
    expected = safetensors.numpy.load_file(
        golden / "distributed" / "dspark_vanilla_b7_two_rank_grads.safetensors"
    )
    devices = jax.devices("cpu")[:2]  # also where there is a GPU
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=devices)
    by_row = NamedSharding(mesh, P("data"))
    everywhere = NamedSharding(mesh, P())
    rows = jax.device_put((case.batch, case.states, case.anchors), by_row)
    params = jax.device_put(case.params, everywhere)
    train_config = case.train_config()
    ours, outcome = case.gradients(train_config, params, rows)
    about = json.loads(
        (golden / "distributed" / "dspark_vanilla_b7_two_rank.json").read_text()
    )
    np.testing.assert_allclose(
        outcome.loss, about["mean_of_backward_losses"], rtol=1e-5
    )
    for key, theirs in expected.items():
        name = key.split("/", 1)[-1]
        np.testing.assert_allclose(ours[name], theirs, **GRADIENT, err_msg=key)
    chex.assert_trees_all_close(ours, case.gradients(train_config)[0], atol=1e-6)


def make_state(small, config):
    _, target_params, drafters, _ = small
    params = tuple(
        step.init_params(jax.random.key(i), d, target_params.final_norm)
        for i, d in enumerate(drafters)
    )
    return step.init_state(params, config)


def test_joint_training_equals_separate_training(small):
    target, params, drafters, batch = small
    config = settings.TrainConfig(num_anchors=6, tap_scale=(2.0, 0.5))
    states = target_states.compute(target, params, batch, drafters[0].tap_layers)

    @functools.partial(jax.jit, static_argnames=("drafters",))
    def run(state, *, drafters):
        return step.train_step(
            jax.random.key(3),
            state,
            batch,
            params,
            jnp.float32(1e-2),
            target=target,
            drafters=drafters,
            config=config,
            states=states,
        )

    state = make_state(small, config)
    joint, outcomes = run(state, drafters=drafters)
    for index, drafter in enumerate(drafters):
        alone = step.TrainState(
            step=state.step,
            params=state.params[index : index + 1],
            optimizer=state.optimizer[index : index + 1],
        )
        alone, (outcome,) = run(alone, drafters=(drafter,))
        np.testing.assert_allclose(outcome.loss, outcomes[index].loss, rtol=1e-5)
        chex.assert_trees_all_close(alone.params[0], joint.params[index], atol=1e-4)


def test_loss_falls_and_nothing_recompiles(small):
    target, params, drafters, batch = small
    config = settings.TrainConfig(num_anchors=8, learning_rate=3e-2)

    @jax.jit
    @chex.assert_max_traces(n=1)
    def run(key, state, rate, ce):
        return step.train_step(
            key,
            state,
            batch,
            params,
            rate,
            ce,
            target=target,
            drafters=drafters,
            config=config,
        )

    state = make_state(small, config)
    found = []
    for index in range(25):
        rate = settings.learning_rate(index, 25, config)
        state, outcomes = run(
            jax.random.key(index),
            state,
            jnp.float32(rate),
            jnp.full(2, 0.1, jnp.float32),
        )
        found.append([float(outcome.loss) for outcome in outcomes])
    assert np.all(np.mean(found[-5:], axis=0) < 0.9 * np.mean(found[:3], axis=0))


def test_drafters_must_fit_together(small):
    target, params, drafters, batch = small
    config = settings.TrainConfig()
    other = dataclasses.replace(drafters[1], block_size=4)
    with pytest.raises(ValueError, match="must have one block_size, got 3 and 4"):
        step.train_step(
            jax.random.key(0),
            make_state(small, config),
            batch,
            params,
            jnp.float32(0),
            target=target,
            drafters=(drafters[0], other),
            config=config,
        )
