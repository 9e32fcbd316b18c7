"""Configurations, shapes and models that no engine is made of, and why."""

import dataclasses

import jax.numpy as jnp
import pytest

from dspark_jax import serving
from dspark_jax.drafters.prompt_lookup import make_prompt_lookup
from dspark_jax.serving import Bucket, EngineConfig
from dspark_jax.testing import make_tiny_models
from dspark_jax.types import Bound

BAD_CONFIGS = (
    ({"mode": "fast"}, "mode must be one of .* got 'fast'"),
    ({"rule": "best"}, "rule must be one of .* got 'best'"),
    ({"num_slots": 0}, "num_slots must be at least 1, got 0"),
    ({"page_size": 12}, "page_size must be a power of two, got 12"),
    ({"max_prefill_steps": 0}, "max_prefill_steps must be at least 1, got 0"),
    ({"max_deferred": 0}, "max_deferred must be at least 1, got 0"),
    ({"max_prefill_delay": -1}, "max_prefill_delay must be at least 0, got -1"),
    ({"margin": 1.0}, r"margin must lie in \[0, 1\), got 1.0"),
    ({"plain_margin": -1.0}, r"plain_margin must lie in \[0, 1\), got -1.0"),
    ({"dispatch_ahead": 2}, r"dispatch_ahead must be one of \(0, 1\), got 2"),
    ({"sampling_fields": ("warmth",)}, "sampling_fields must be among .* 'warmth'"),
    ({"sampling_fields": ("top_p",)}, "sampling_fields must have 'temperature'"),
)


@pytest.mark.parametrize(("fields", "message"), BAD_CONFIGS)
def test_bad_configurations(fields, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(**fields)


BAD_ENGINES = (
    ({"max_length": 66}, "`config.max_length` must be at most .* 65, got 66"),
    ({"draft_length": 4}, "must be at most the drafter's block size 3, got 4"),
    ({"buckets": ()}, r"buckets must name at least one shape, got \(\)"),
    ({"buckets": (Bucket(2, 8),)}, "must have one of at least num_slots = 16"),
    (
        {"buckets": (Bucket(16, 65),)},
        "must not have more tokens than their requests can feed, 16",
    ),
    ({"buckets": (Bucket(16, 32),)}, r"must have the shape Bucket\(.*tokens=64\)"),
    (
        {"buckets": (Bucket(16, 16), Bucket(16, 64)), "mode": "static"},
        "mode 'static' runs .* only, but buckets have",
    ),
    (
        {
            "buckets": tuple(Bucket(16, 4 * n) for n in range(5, 17)),
            "prefill_groups": 1,
        },
        "at most 12 programs with those for prefill, got 13",
    ),
    (
        {"buckets": tuple(Bucket(16, 16 + n) for n in range(49))},
        "at most 12 programs with those for prefill and for catching up, got 52",
    ),
)


@pytest.mark.parametrize(("fields", "message"), BAD_ENGINES)
def test_bad_shapes(fields, message, models):
    config = EngineConfig(**{"max_length": 32, **fields})
    with pytest.raises(ValueError, match=message):
        serving.Engine(*models, config=config)


def test_bad_buckets():
    with pytest.raises(TypeError, match=r"Bucket\.tokens must be an int, got 2\.0"):
        Bucket(1, 2.0)
    with pytest.raises(ValueError, match=r"at least Bucket.requests >= 1, got 1 and 2"):
        Bucket(2, 1)


def test_models_that_cannot_be_served(models):
    config = EngineConfig(max_length=32)
    with pytest.raises(TypeError, match="`target` must be a Target, got int"):
        serving.Engine(3, None, config=config)
    with pytest.raises(TypeError, match="`config` must be an EngineConfig, got dict"):
        serving.Engine(*models, config={"max_length": 32})
    with pytest.raises(TypeError, match="mode 'compact' needs a `drafter`"):
        serving.Engine(models.target, models.target_params, config=config)
    with pytest.raises(TypeError, match="`drafter_params` must be the drafter's"):
        serving.Engine(*models[:3], config=config)
    drafter, params = make_prompt_lookup(3)
    with pytest.raises(TypeError, match=r"`drafter` cannot be served: .*DenseCache"):
        serving.Engine(*models[:2], drafter, params, config=config)
    unsure = make_tiny_models(drafter_fields={"confidence_kind": "none"})
    with pytest.raises(ValueError, match=r"`mode 'compact'` needs .* confidence head"):
        serving.Engine(*unsure, config=config)
    serving.Engine(*unsure, config=dataclasses.replace(config, mode="static"))
    other = models.target._replace(init_cache=_tokens_as_cache)
    with pytest.raises(
        TypeError, match=r"`target` cannot be served: .* is an array, and"
    ):
        serving.Engine(other, *models[1:], config=config)
    dense = models.target._replace(forward=Bound(_own_attention, (models.target,)))
    with pytest.raises(TypeError, match="does not run on packed rows"):
        serving.Engine(dense, *models[1:], config=config)
    with pytest.raises(TypeError, match="`costs` must be Costs or OnlineCosts"):
        serving.Engine(*models, config=config, costs={"tokens": 1})


def _tokens_as_cache(batch, capacity):
    return jnp.zeros((batch, capacity), jnp.int32)


def _own_attention(target, params, tokens, positions, cache, *, tap_layers=()):
    """A forward pass that looks into the cache itself."""
    keys = cache.keys[0]
    return target.embed(params, tokens) + keys.sum(), None, cache
