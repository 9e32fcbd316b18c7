"""Generation under JAX's switches: no leaked tracer, no 64-bit number, no NaN."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rollouts

import dspark_jax
from dspark_jax import sampling, testing

RULES = ("token", "block", "seeded", "greedy")


@pytest.fixture(scope="module")
def models():
    return rollouts.make_models()


@pytest.fixture(scope="module")
def keys():
    return rollouts.make_keys()


def by_rule(rule, models, keys):
    """The two settings that differ: rule and temperature."""
    inputs = list(rollouts.arrays(models, keys))
    inputs[4] = None if rule == "greedy" else inputs[4]
    function = functools.partial(
        rollouts.rollout,
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
