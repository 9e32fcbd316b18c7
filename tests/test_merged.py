"""Merged projections: one matrix where two or three multiply the same rows."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import layers
from dspark_jax.config import BlockConfig

# SmolLM2's sizes: XLA:CPU's products of odd small ones differ in the last bit, as the
# rows of weights lie in other tiles.
PLAIN = BlockConfig(
    width=576, num_heads=9, num_kv_heads=3, head_width=64, ffn_width=1536
)
QWEN = dataclasses.replace(PLAIN, qk_norm=True)
BIASED = dataclasses.replace(PLAIN, attention_bias=True, mlp_bias=True)


def outputs(params, config, x):
    positions = jnp.broadcast_to(jnp.arange(x.shape[1], dtype=jnp.int32), x.shape[:2])

    def attend(query, key, value):
        groups = query.shape[2] // key.shape[2]
        seen = jnp.repeat(key + value, groups, axis=2)
        return query + seen, (query, key, value)

    out, parts = layers.block(params, config, x, positions, attend)
    return out, parts, layers.keys_values(params, config, x, positions)


@pytest.mark.parametrize("config", [QWEN, BIASED])
@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_outputs_are_bit_equal(config, rows, dtype):
    key = jax.random.key(0)
    params = layers.init_from_abstract(key, layers.abstract_block(config, dtype))
    noise = jax.random.normal(key, (3072,)).astype(dtype)
    params = params.replace(
        **{
            name: noise[: getattr(params, name).size]
            for name in ("q_bias", "k_bias", "v_bias", "gate_bias", "up_bias")
            if getattr(params, name) is not None
        }
    )
    merged = layers.merged({"blocks": (params,)})["blocks"][0]
    assert merged.k is merged.v is merged.up is merged.k_bias is None
    x = jax.random.normal(key, (1, rows, config.width)).astype(dtype)
    run = jax.jit(outputs, static_argnums=1)
    for ours, theirs in zip(
        jax.tree.leaves(run(merged, config, x)),
        jax.tree.leaves(run(params, config, x)),
        strict=True,
    ):
        np.testing.assert_array_equal(ours, theirs)


def test_merging_twice_changes_nothing():
    params = layers.init_from_abstract(
        jax.random.key(0), layers.abstract_block(PLAIN, "float32")
    )
    merged = layers.merged(params)
    assert layers.merged(merged) is merged
    assert merged.q.shape == (960, 576)
    assert merged.gate.shape == (3072, 576)
