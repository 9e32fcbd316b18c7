"""Eight devices make the step that one device makes."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.training import settings, sharding, step

pytestmark = pytest.mark.usefixtures("quick_compilation")


def make_mesh(data=0, fsdp=1):
    """Of eight CPU devices, also where there is a GPU."""
    return sharding.make_mesh(data, fsdp, jax.devices("cpu"))


@pytest.mark.parametrize(("data", "fsdp"), [(8, 1), (1, 8), (2, 4)])
def test_a_step_on_eight_devices_equals_one(small, data, fsdp, monkeypatch):
    monkeypatch.setattr(sharding, "_SMALL", 1)
    target, target_params, drafters, batch = small
    config = settings.TrainConfig(num_anchors=6)
    params = tuple(
        step.init_params(jax.random.key(i), d, target_params.final_norm)
        for i, d in enumerate(drafters)
    )
    state = step.init_state(params, config)

    @jax.jit
    def run(state, batch, target_params):
        return step.train_step(
            jax.random.key(3),
            state,
            batch,
            target_params,
            jnp.float32(1e-2),
            target=target,
            drafters=drafters,
            config=config,
        )

    cpu = jax.devices("cpu")[0]
    state, batch, target_params = jax.device_put((state, batch, target_params), cpu)
    expected, outcomes = run(state, batch, target_params)
    mesh = make_mesh(data, fsdp)
    everywhere = sharding.replicated(mesh)
    spread = jax.device_put(state, sharding.state_sharding(mesh, state))
    if fsdp > 1:
        w1 = spread.params[0].markov.w2
        assert w1.addressable_shards[0].data.size <= w1.size
        specs = jax.tree.map(lambda x: "fsdp" in x.sharding.spec, spread.params)
        assert any(jax.tree.leaves(specs))
    found, spread_outcomes = run(
        spread,
        jax.device_put(batch, sharding.batch_sharding(mesh)),
        jax.device_put(target_params, everywhere),
    )
    for ours, theirs in zip(spread_outcomes, outcomes, strict=True):
        np.testing.assert_allclose(ours.loss, theirs.loss, rtol=1e-5)
        np.testing.assert_allclose(ours.gradient_norm, theirs.gradient_norm, rtol=1e-5)
    # Adam divides tiny gradients by themselves: compared on the step's own scale.
    chex.assert_trees_all_close(
        jax.device_get(found.params), jax.device_get(expected.params), atol=2e-3
    )
    chex.assert_trees_all_close(
        jax.device_get(_first_moments(found)),
        jax.device_get(_first_moments(expected)),
        atol=1e-6,
    )


def _first_moments(state):
    return [optimizer[1].mu for optimizer in state.optimizer]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((9, 1), "must be at most the 8 devices, got 9 x 1"),
        ((0, 3), "fsdp must divide the 8 devices, got 3"),
        ((1, 0), "fsdp at least 1, got 1 and 0"),
    ],
)
def test_bad_meshes(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_mesh(*arguments)


def test_all_devices_are_used_by_default():
    assert dict(make_mesh().shape) == {"data": 8, "fsdp": 1}
    assert dict(make_mesh(fsdp=2).shape) == {"data": 4, "fsdp": 2}


def test_small_arrays_are_copied():
    mesh = make_mesh(1, 8)
    found = sharding.state_sharding(
        mesh, {"big": jnp.zeros((8, 4096)), "small": jnp.zeros(64)}
    )
    assert found["big"].spec == jax.sharding.PartitionSpec(None, "fsdp")
    assert found["small"].spec == jax.sharding.PartitionSpec()
