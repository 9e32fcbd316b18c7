"""Generation under JAX's transformations: the same words, and one compilation.

Most tests compare with one baseline program of eight rows.
"""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rollouts
from rollouts import LENGTHS, LIMITS, NEW, PROMPTS, ROWS, STOPS, TEMPERATURE, TOKENS

import dspark_jax
from dspark_jax import checks, testing


@pytest.fixture(scope="module")
def models():
    return rollouts.make_models()


@pytest.fixture(scope="module")
def keys():
    return rollouts.make_keys()


@pytest.fixture(scope="module")
def jitted(models):
    return jax.jit(functools.partial(rollouts.rollout, models=models))


@pytest.fixture(scope="module")
def baseline(models, keys, jitted):
    generation = jitted(*rollouts.arrays(models, keys))
    made = np.array(generation.lengths) - LENGTHS
    assert np.all(made <= LIMITS)
    assert made.max() == NEW  # not all rows stop early
    assert len({tuple(row) for row in np.array(generation.tokens).tolist()}) > 4
    return generation


def assert_same(got, want):
    """Words, lengths, reasons and counts."""
    for name in ("tokens", "lengths", "finish", "stats"):
        chex.assert_trees_all_equal(getattr(got, name), getattr(want, name))


def test_vmap_over_keys(models, keys, baseline):
    """Two prompts, four keys each.

    All rollouts run until the last one is done, and a finished one copies its state in
    every further round: more rows in one batch are cheaper.
    """
    by_sample = {"limits": LIMITS, "temperature": TEMPERATURE, "key": keys}
    by_sample = {k: v.reshape(2, 4).swapaxes(0, 1) for k, v in by_sample.items()}
    got = jax.jit(
        jax.vmap(
            lambda key, limits, temperature: rollouts.rollout(
                key,
                PROMPTS,
                LENGTHS[::4],
                limits,
                temperature,
                models.target_params,
                models.drafter_params,
                models=models,
            )
        )
    )(by_sample["key"], by_sample["limits"], by_sample["temperature"])
    got = jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(ROWS, *x.shape[2:]), got)
    assert_same(got, baseline)


def test_vmap_over_prompts(models, keys, baseline):
    """One row each; the chunks of the prefill, too, run until the longest is done."""
    rows = [x[:, None] for x in (keys, TOKENS, LENGTHS, LIMITS, TEMPERATURE)]
    got = jax.jit(
        jax.vmap(
            functools.partial(rollouts.rollout, models=models),
            in_axes=(0, 0, 0, 0, 0, None, None),
        )
    )(*rows, models.target_params, models.drafter_params)
    assert_same(jax.tree.map(lambda x: x[:, 0], got), baseline)


def test_samples_of_one_prefill(models, keys, baseline):
    got = jax.jit(functools.partial(rollouts.rollout, models=models, num_samples=4))(
        keys,
        PROMPTS,
        LENGTHS[::4],
        LIMITS,
        TEMPERATURE,
        models.target_params,
        models.drafter_params,
    )
    assert_same(got, baseline)


def test_scan_of_rollouts_and_updates(models, keys, jitted):
    _, *fixed, target_params, drafter_params = rollouts.arrays(models, keys)

    def update(params, generation):  # what a policy gradient would do
        reward = jnp.mean(generation.lengths.astype(jnp.float32))
        return jax.tree.map(lambda x: x * (1 - 1e-3 * reward), params)

    @jax.jit
    def train(params, step_keys):
        def step(params, key):
            generation = rollouts.rollout(
                key, *fixed, params, drafter_params, models=models
            )
            return update(params, generation), generation

        return jax.lax.scan(step, params, step_keys)

    step_keys = jax.vmap(lambda k: jax.random.split(k, 2), out_axes=1)(keys)  # [2, B]
    _, got = train(target_params, step_keys)
    for step in range(2):
        want = jitted(step_keys[step], *fixed, target_params, drafter_params)
        assert_same(jax.tree.map(lambda x, step=step: x[step], got), want)
        target_params = update(target_params, want)


def test_shard_map_equals_the_unsharded_run(models, keys, baseline):
    if jax.device_count() < ROWS:
        pytest.skip(f"needs {ROWS} devices")
    mesh = jax.make_mesh((ROWS,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, whole = jax.sharding.PartitionSpec("data"), jax.sharding.PartitionSpec()
    sharded = jax.shard_map(
        functools.partial(rollouts.rollout, models=models),
        mesh=mesh,
        in_specs=(rows,) * 5 + (whole, whole),
        out_specs=rows,
    )
    assert_same(jax.jit(sharded)(*rollouts.arrays(models, keys)), baseline)


def test_x64_keeps_the_words(models, keys, baseline):
    with jax.enable_x64(True):
        got = jax.jit(functools.partial(rollouts.rollout, models=models))(
            *rollouts.arrays(models, keys)
        )
    assert_same(got, baseline)


def test_nothing_retraces(models, keys):
    @functools.partial(jax.jit, static_argnames=("target", "drafter"))
    @chex.assert_max_traces(n=1)
    def generate_once(
        key,
        tokens,
        lengths,
        limits,
        stops,
        temperature,
        threshold,
        params,
        *,
        target,
        drafter,
    ):
        return dspark_jax.speculative_generate(
            key,
            tokens,
            lengths,
            target=target,
            target_params=params[0],
            drafter=drafter,
            drafter_params=params[1],
            max_new_tokens=2,
            limits=limits,
            stop_tokens=stops,
            sampling=dspark_jax.Sampling(temperature=temperature),
            confidence_threshold=threshold,
        )

    params = (models.target_params, models.drafter_params)
    call = functools.partial(
        generate_once, target=models.target, drafter=models.drafter
    )
    first = [
        keys[:2],
        PROMPTS,
        LENGTHS[::4],
        np.full((2,), 2, np.int32),
        STOPS,
        0.5,
        0.5,
    ]
    call(*first, params)
    second = [
        keys[2:4],
        PROMPTS + 1,
        LENGTHS[::4] - 1,
        np.array([1, 0], np.int32),
        STOPS + 1,
        0.0,
        0.9,
    ]
    for index, value in enumerate(second):
        call(*first[:index], value, *first[index + 1 :], params)
    call(*first, jax.tree.map(lambda x: 2 * x, params))
    again = testing.make_tiny_models(block_size=2)
    assert again.target is not models.target
    generate_once(*first, params, target=again.target, drafter=again.drafter)


def test_a_turn_that_does_not_fit_leaves_its_row_alone(models):
    """Under a trace lengths are unknown: nothing can be raised."""
    plain = {
        "target": models.target,
        "target_params": models.target_params,
        "drafter": None,
        "drafter_params": None,
    }

    @jax.jit
    def two_turns(key, lengths):
        state = dspark_jax.prefill(
            key, PROMPTS, LENGTHS[::4], max_new_tokens=1, capacity=10, **plain
        )
        turn = np.full((2, 5), 4, np.int32)
        return state, dspark_jax.extend(state, turn, lengths, max_new_tokens=3, **plain)

    before, after = two_turns(jax.random.key(0), np.array([5, 5], np.int32))
    np.testing.assert_array_equal(before.lengths, [6, 4])
    np.testing.assert_array_equal(after.lengths, [6, 10])
    np.testing.assert_array_equal(after.tokens[0], before.tokens[0])
    np.testing.assert_array_equal(after.tokens[1, 4:9], np.full((5,), 4))
    finish = dspark_jax.FINISH_REASONS.index("length")
    assert after.finish[0] == finish


def test_keys_of_other_generators_do_not_see_their_neighbours():
    """A vmap over "rbg" keys draws from the first key only."""
    keys = jax.random.split(jax.random.key(0, impl="rbg"), 3)
    together = jax.random.key_data(checks.request_keys(keys, 3))
    alone = jax.random.key_data(checks.request_keys(keys[1:2], 1))
    np.testing.assert_array_equal(together[1:2], alone)
    assert len({tuple(row) for row in together.tolist()}) == 3
    one = checks.request_keys(jax.random.key(0, impl="rbg"), 2)
    assert str(jax.random.key_impl(one)) == "threefry2x32"
