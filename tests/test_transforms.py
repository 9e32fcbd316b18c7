"""Generation under JAX's transformations and switches: the same words, one compilation.

Rows are independent and noise belongs to a row's key, so most tests compare with one
baseline program of eight rows.
"""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dspark_jax
from dspark_jax import checks, sampling, testing
from dspark_jax.config import BlockConfig, DecoderConfig, DrafterConfig
from dspark_jax.drafters import dspark
from dspark_jax.targets import decoder

ROWS, WIDTH, NEW = 8, 5, 9
PROMPTS = np.array([[3, 1, 4, 1, 5], [9, 2, 6, 0, 0]], np.int32)
TOKENS = np.repeat(PROMPTS, 4, axis=0)
LENGTHS = np.repeat(np.array([5, 3], np.int32), 4)
LIMITS = np.array([9, 9, 4, 1, 9, 0, 9, 7], np.int32)
TEMPERATURE = np.array([1, 0, 0.7, 1, 0.2, 1, 1, 3], np.float32)
STOPS = np.array([2, 11], np.int32)


@pytest.fixture(scope="module")
def models():
    return testing.make_tiny_models(block_size=2)


@pytest.fixture(scope="module")
def keys():
    return jax.random.split(jax.random.key(1), ROWS)


def rollout(
    key,
    tokens,
    lengths,
    limits,
    temperature,
    target_params,
    drafter_params,
    *,
    models,
    rule="token",
    **options,
):
    return dspark_jax.speculative_generate(
        key,
        tokens,
        lengths,
        target=models.target,
        target_params=target_params,
        drafter=models.drafter,
        drafter_params=drafter_params,
        max_new_tokens=NEW,
        limits=limits,
        sampling=dspark_jax.Sampling(temperature=temperature),
        options=dspark_jax.Speculation(rule=rule),
        **{"stop_tokens": STOPS, "confidence_threshold": 0.3, **options},
    )


def arrays(models, keys):
    return (
        keys,
        TOKENS,
        LENGTHS,
        LIMITS,
        TEMPERATURE,
        models.target_params,
        models.drafter_params,
    )


@pytest.fixture(scope="module")
def jitted(models):
    return jax.jit(functools.partial(rollout, models=models))


@pytest.fixture(scope="module")
def baseline(models, keys, jitted):
    generation = jitted(*arrays(models, keys))
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
            lambda key, limits, temperature: rollout(
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
            functools.partial(rollout, models=models),
            in_axes=(0, 0, 0, 0, 0, None, None),
        )
    )(*rows, models.target_params, models.drafter_params)
    assert_same(jax.tree.map(lambda x: x[:, 0], got), baseline)


def test_samples_of_one_prefill(models, keys, baseline):
    got = jax.jit(functools.partial(rollout, models=models, num_samples=4))(
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
    _, *fixed, target_params, drafter_params = arrays(models, keys)

    def update(params, generation):  # what a policy gradient would do
        reward = jnp.mean(generation.lengths.astype(jnp.float32))
        return jax.tree.map(lambda x: x * (1 - 1e-3 * reward), params)

    @jax.jit
    def train(params, step_keys):
        def step(params, key):
            generation = rollout(key, *fixed, params, drafter_params, models=models)
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
        functools.partial(rollout, models=models),
        mesh=mesh,
        in_specs=(rows,) * 5 + (whole, whole),
        out_specs=rows,
    )
    assert_same(jax.jit(sharded)(*arrays(models, keys)), baseline)


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


RULES = ("token", "block", "seeded", "greedy")


def by_rule(rule, models, keys):
    """The two settings that differ: rule and temperature."""
    inputs = list(arrays(models, keys))
    inputs[4] = None if rule == "greedy" else inputs[4]
    function = functools.partial(
        rollout,
        models=models,
        rule="token" if rule == "greedy" else rule,
        return_logprobs=True,
    )
    return function, inputs


@pytest.mark.parametrize("rule", RULES)
def test_no_tracer_leaks(rule, models, keys):
    function, inputs = by_rule(rule, models, keys)
    with jax.checking_leaks():
        jax.eval_shape(function, *inputs)


@pytest.mark.parametrize("rule", RULES)
def test_x64_keeps_the_types(rule, models, keys):
    function, inputs = by_rule(rule, models, keys)
    with jax.enable_x64(False):
        want = jax.eval_shape(function, *inputs)
    with jax.enable_x64(True):
        got = jax.eval_shape(function, *inputs)
        lookup, none = dspark_jax.make_prompt_lookup(block_size=2)
        options = {"confidence_threshold": None}
        inputs[-1] = none
        with_lookup = jax.eval_shape(
            functools.partial(
                function, **options, models=models._replace(drafter=lookup)
            ),
            *inputs,
        )
    chex.assert_trees_all_equal_shapes_and_dtypes(got, want)
    chex.assert_trees_all_equal_shapes_and_dtypes(with_lookup, want)
    dtypes = {str(leaf.dtype) for leaf in jax.tree.leaves(got)}
    assert dtypes == {"int32", "float32"}


def test_x64_keeps_the_words(models, keys, baseline):
    with jax.enable_x64(True):
        got = jax.jit(functools.partial(rollout, models=models))(*arrays(models, keys))
    assert_same(got, baseline)


@pytest.mark.parametrize("rule", RULES)
def test_debug_nans_finds_none(rule, keys):
    small = testing.make_tiny_models(block_size=2, target_fields={"num_layers": 1})
    function, inputs = by_rule(rule, small, keys)
    with jax.debug_nans(True):
        generation = jax.jit(function)(*inputs)
    assert np.all(np.isfinite(generation.logprobs.raw))
    assert np.all(np.isfinite(generation.logprobs.sampling))


def test_debug_nans_finds_none_op_by_op():
    """Inside a program only its outputs are looked at; here NaNs masked later show."""
    logits = jnp.array([[0.5, -jnp.inf, 2.0, 2.0], [1.0, 0.0, -3.0, -jnp.inf]])
    ids = jnp.broadcast_to(jnp.arange(4), (2, 4))
    settings = {"temperature": [0.0, 0.7], "top_k": [4, 1], "top_p": [1.0, 0.5]}
    settings = {name: jnp.array(value) for name, value in settings.items()}
    settings = dspark_jax.Sampling(**settings, min_p=jnp.array([0.0, 0.9]))
    with jax.debug_nans(True):
        row = sampling.make_row(logits, settings)
        p = sampling.probability(logits, ids, row, settings.temperature)
        plain = sampling.make_row(logits, dspark_jax.Sampling(jnp.ones((2,))))
    np.testing.assert_array_equal(p, [[0, 0, 1, 0], [1, 0, 0, 0]])
    assert np.all(np.isfinite(plain.log_normaliser))


# Memory: a cache of 4104 positions beside which everything else is small.


@pytest.fixture(scope="module")
def wide():
    """Shapes only: nothing of these models is ever run."""
    block = BlockConfig(
        width=8, num_heads=1, num_kv_heads=1, head_width=64, ffn_width=8
    )
    fields = {"vocab_size": 19, "max_position": 8192, "block": block}
    config = DecoderConfig(num_layers=2, **fields)
    drafter_config = DrafterConfig(
        num_layers=1,
        block_size=2,
        mask_token=1,
        tap_layers=(0, 1),
        num_target_layers=2,
        markov_rank=4,
        **fields,
    )
    target = decoder.make_target(config)
    return testing.TinyModels(
        target=target,
        target_params=decoder.abstract(config),
        drafter=dspark.make_drafter(drafter_config, target),
        drafter_params=dspark.abstract(drafter_config),
    )


def cache_bytes(models, capacity):
    def make():
        return (
            models.target.init_cache(1, capacity),
            models.drafter.init_state(1, capacity),
        )

    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(jax.eval_shape(make)))


def test_a_generation_holds_one_cache(wide):
    compiled = (
        jax.jit(
            lambda key, tokens, lengths, target_params, drafter_params: (
                dspark_jax.speculative_generate(
                    key,
                    tokens,
                    lengths,
                    target=wide.target,
                    target_params=target_params,
                    drafter=wide.drafter,
                    drafter_params=drafter_params,
                    max_new_tokens=4096,
                )
            )
        )
        .lower(
            jax.random.key(0),
            np.ones((1, 8), np.int32),
            np.ones((1,), np.int32),
            wide.target_params,
            wide.drafter_params,
        )
        .compile()
    )
    memory = compiled.memory_analysis()
    held = memory.temp_size_in_bytes + memory.output_size_in_bytes
    one = cache_bytes(wide, 4104)
    assert one <= held < 1.5 * one


def test_rounds_update_a_donated_state_in_place(wide):
    state = jax.eval_shape(
        lambda key, tokens, lengths, target_params, drafter_params: dspark_jax.prefill(
            key,
            tokens,
            lengths,
            max_new_tokens=4096,
            capacity=4104,
            target=wide.target,
            target_params=target_params,
            drafter=wide.drafter,
            drafter_params=drafter_params,
        ),
        jax.random.key(0),
        np.ones((1, 8), np.int32),
        np.ones((1,), np.int32),
        wide.target_params,
        wide.drafter_params,
    )

    def stream(state, target_params, drafter_params):
        return dspark_jax.speculative_rounds(
            state,
            2,
            target=wide.target,
            target_params=target_params,
            drafter=wide.drafter,
            drafter_params=drafter_params,
        )

    memory = (
        jax.jit(stream, donate_argnames="state")
        .lower(state, wide.target_params, wide.drafter_params)
        .compile()
        .memory_analysis()
    )
    one = cache_bytes(wide, 4104)
    assert memory.alias_size_in_bytes >= one
    assert memory.temp_size_in_bytes < 0.5 * one


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
