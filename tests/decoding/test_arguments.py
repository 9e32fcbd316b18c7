"""What a state and the settings may be, where only values or shapes can tell."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dspark_jax
from dspark_jax import sampling
from dspark_jax.decoding import arguments
from dspark_jax.drafters import dspark

TOKENS = jnp.asarray([[3, 1, 4, 1, 5]], jnp.int32)
LENGTHS = jnp.asarray([5], jnp.int32)


@pytest.fixture(scope="module")
def models():
    return dspark_jax.testing.make_tiny_models()


def prefill(models, **changes):
    settings = {
        "target": models.target,
        "target_params": models.target_params,
        "drafter": models.drafter,
        "drafter_params": models.drafter_params,
        "capacity": 16,
        "max_new_tokens": 8,
        "stop_tokens": (),
    } | changes
    return dspark_jax.prefill(jax.random.key(0), TOKENS, LENGTHS, **settings)


def test_plain_steps_refuse_a_state_that_a_drafter_follows(models):
    state = prefill(models)
    with pytest.raises(ValueError, match="call `prefill` with drafter=None"):
        dspark_jax.autoregressive_steps(
            state, None, target=models.target, target_params=models.target_params
        )


def test_a_round_has_the_draft_length_of_its_prefill(models):
    state = prefill(models, options=dspark_jax.Speculation(draft_length=1))
    message = "`options.draft_length` must be that of `prefill`, 1, got 2"
    with pytest.raises(ValueError, match=re.escape(message)):
        dspark_jax.speculative_round(
            state,
            target=models.target,
            target_params=models.target_params,
            drafter=models.drafter,
            drafter_params=models.drafter_params,
            options=dspark_jax.Speculation(draft_length=2),
        )


def test_the_callers_keys_survive_a_donated_state(models):
    keys = jax.random.split(jax.random.key(0), 1)
    state = dspark_jax.prefill(
        keys,
        TOKENS,
        LENGTHS,
        target=models.target,
        target_params=models.target_params,
        drafter=None,
        drafter_params=None,
        capacity=8,
        max_new_tokens=2,
    )
    assert state.key is not keys
    jax.jit(lambda state: state, donate_argnums=0)(state)
    np.testing.assert_array_equal(jax.random.key_data(keys).shape, (1, 2))


@pytest.mark.parametrize("number", [np.uint8(4), np.int8(4)])
def test_numpy_integers_do_not_wrap_around(models, number):
    """Of one byte each: the prompt's 252 tokens and 4 more are not 0, nor is 4 * 64."""
    wide = jnp.broadcast_to(TOKENS[:, :1], (64, 252))

    def generate(tokens):
        return dspark_jax.autoregressive_generate(
            jax.random.key(0),
            tokens,
            jnp.full((64,), 252, jnp.int32),
            target=target,
            target_params=params,
            max_new_tokens=number,
            num_samples=number,
        )

    target, params = dspark_jax.testing.make_tiny_models(
        target_fields={"max_position": 256}
    )[:2]
    assert jax.eval_shape(generate, wide).tokens.shape == (256, 256)


def test_uniform_at_the_largest_temperature():
    logits = jnp.asarray([0.0, 1e4, -1e4, jnp.nan_to_num(-jnp.inf)])
    gumbel = jax.random.gumbel(jax.random.key(0), (4000, 4))
    for temperature in (sampling.MAX_TEMPERATURE, jnp.inf):  # traced ones go unchecked
        found = sampling.perturb(
            jnp.broadcast_to(logits, (4000, 4)),
            jnp.full((4000,), 1e4),
            jnp.full((4000,), temperature, jnp.float32),
            gumbel,
        )
        counts = np.bincount(np.asarray(found.argmax(-1)), minlength=4)
        assert abs(counts[:3] - counts[:3].mean()).max() < 5 * np.sqrt(4000 / 3)


def test_an_empty_draft_vocabulary_is_refused(models):
    with pytest.raises(ValueError, match="`ids` must hold at least one token id"):
        dspark.with_draft_vocabulary(
            models.drafter_params,
            models.target,
            models.target_params,
            jnp.zeros((0,), jnp.int32),
        )


@jax.jit
def law(logits, settings):
    """p of every token of one row."""
    row = sampling.make_row(logits, settings)
    ids = jnp.broadcast_to(jnp.arange(logits.shape[1], dtype=jnp.int32), logits.shape)
    return sampling.probability(logits, ids, row, settings.temperature)


@pytest.mark.parametrize("name", ["top_k", "top_p", "min_p"])
def test_the_best_token_stays_whatever_a_traced_cut_holds(name):
    # Values under a trace are not checked: "off" is 0 elsewhere, and 9 is no share.
    value = jnp.asarray([9.0]) if name == "min_p" else jnp.asarray([0])
    dtype = jnp.int32 if name == "top_k" else jnp.float32
    settings = sampling.Sampling(
        temperature=jnp.ones((1,)), **{name: value.astype(dtype)}
    )
    found = law(jnp.asarray([[0.0, 2.0, 1.0]]), settings)
    np.testing.assert_allclose(found, [[0.0, 1.0, 0.0]], atol=1e-6)


def test_the_law_sums_to_one_at_a_small_temperature():
    logits = 30 + jnp.asarray([[0.0, 1e-3, -2e-3, -5.0]])
    temperature = np.float32(1e-3)
    found = law(logits, sampling.Sampling(temperature=jnp.asarray([temperature])))
    exact = np.asarray(logits, np.float64) / np.float64(temperature)
    exact = np.exp(exact - exact.max())
    np.testing.assert_allclose(found, exact / exact.sum(), atol=1e-6)


def test_numbers_may_be_of_16_bits(models):
    half = jnp.bfloat16(0.5)
    settings = sampling.check_sampling(
        dspark_jax.Sampling(temperature=half, top_p=jnp.asarray([half, half])), 2
    )
    assert settings.temperature.dtype == settings.top_p.dtype == jnp.float32
    np.testing.assert_array_equal(settings.temperature, [0.5, 0.5])
    threshold = arguments.make_threshold(half, models.drafter, 1)
    np.testing.assert_array_equal(threshold, [0.5])
    temperatures = arguments.make_temperatures(jnp.asarray([half] * 3), 3)
    np.testing.assert_array_equal(temperatures, [0.5] * 3)


@pytest.mark.parametrize("value", [True, "0.5", 1j])
def test_what_is_no_number_is_refused(models, value):
    with pytest.raises(TypeError, match=r"`sampling\.temperature` must hold numbers"):
        sampling.check_sampling(dspark_jax.Sampling(temperature=value), 2)
    with pytest.raises(ValueError, match="`confidence_threshold` must lie in"):
        arguments.make_threshold(value, models.drafter, 1)


def test_a_settings_object_is_a_pytree_of_numbers():
    settings = sampling.Sampling(temperature=0.5, top_k=3)
    assert functools.reduce(max, jax.tree.leaves(settings)) == 3
