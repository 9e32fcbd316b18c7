"""Layers where sizes or dtypes decide which code the backend runs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import layers
from dspark_jax.config import BlockConfig
from dspark_jax.targets import load
from pallas_kernels import products


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("rows", [1, 8])
def test_attention_of_16_bit_models_at_real_sizes(dtype, rows):
    """Tiny products are fused into loops on a CPU; these need a product that it has."""
    random = np.random.default_rng(0)

    def draw(*shape):
        return jnp.asarray(random.normal(size=shape), dtype)

    query = draw(4, 1, rows, 9, 64)
    keys, values = draw(4, 3, 280, 64), draw(4, 3, 280, 64)
    own = draw(4, 1, rows, 3, 64)
    attend = jax.jit(layers.grouped_attention)
    got = attend(query, [(keys, values, None), (own, own, None)])
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), (query, keys, values, own))
    want = attend(wide[0], [(wide[1], wide[2], None), (wide[3], wide[3], None)])
    assert got.dtype == dtype
    np.testing.assert_allclose(got.astype(jnp.float32), want, atol=0.02)


BLOCK = BlockConfig(
    width=32,
    num_heads=6,
    num_kv_heads=2,
    head_width=8,
    ffn_width=24,
    qk_norm=True,
    attention_bias=True,
    mlp_bias=True,
)


def random_tensors():
    random = np.random.default_rng(0)
    return {
        name: random.normal(size=shape).astype(np.float32)
        for name, shape in load.block_shapes(BLOCK, "a.").items()
    }


def test_joined_matrices_are_those_of_the_checkpoint():
    tensors = random_tensors()
    assert tensors["a.self_attn.q_proj.weight"].shape == (48, 32)
    assert tensors["a.self_attn.v_proj.bias"].shape == (16,)
    assert tensors["a.mlp.up_proj.weight"].shape == (24, 32)
    params = load.block_params(BLOCK, tensors, "a.", np.dtype("float32"))
    names = [f"a.self_attn.{name}_proj.weight" for name in "qkv"]
    np.testing.assert_array_equal(
        params.qkv, np.concatenate([tensors[name] for name in names])
    )
    written = load.block_tensors(BLOCK, params, "a.")
    assert written.keys() == tensors.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(written[name], tensor)


def test_parts_of_two_16_bit_types_are_joined():
    tensors = random_tensors()
    half = {
        "a.self_attn.k_proj.weight": "float16",
        "a.self_attn.v_proj.weight": "bfloat16",
    }
    for name, dtype in half.items():
        tensors[name] = np.asarray(jnp.asarray(tensors[name], dtype))
    params = load.block_params(BLOCK, tensors, "a.", np.dtype("float32"))
    written = load.block_tensors(BLOCK, params, "a.")
    for name in half:
        np.testing.assert_array_equal(written[name], tensors[name].astype(np.float32))


def test_parts_of_joined_products():
    """Queries, keys and values, each from its own rows, as a checkpoint has them."""
    tensors = random_tensors()
    params = load.block_params(BLOCK, tensors, "a.", np.dtype("float32"))
    x = jnp.asarray(np.random.default_rng(1).normal(size=(2, 3, 32)), jnp.float32)
    positions = jnp.zeros((2, 3), jnp.int32)  # where nothing is rotated
    found = layers.queries_keys_values(params, BLOCK, x, positions)

    def project(name, heads):
        weight, bias = (
            tensors[f"a.self_attn.{name}_proj.{x}"] for x in ("weight", "bias")
        )
        rows = (np.asarray(x) @ weight.T + bias).reshape(2, 3, heads, 8)
        if name == "v":
            return rows
        rows = rows / np.sqrt((rows**2).mean(-1, keepdims=True) + BLOCK.rms_eps)
        return rows * tensors[f"a.self_attn.{name}_norm.weight"]

    for got, name, heads in zip(found, "qkv", (6, 2, 2), strict=True):
        np.testing.assert_allclose(got, project(name, heads), rtol=2e-4, atol=2e-5)
    for got, want in zip(
        layers.keys_values(params, BLOCK, x, positions), found[1:], strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    gate, up = (
        np.asarray(x) @ tensors[f"a.mlp.{name}_proj.weight"].T
        + tensors[f"a.mlp.{name}_proj.bias"]
        for name in ("gate", "up")
    )
    hidden = gate / (1 + np.exp(-gate)) * up
    want = (
        hidden @ tensors["a.mlp.down_proj.weight"].T + tensors["a.mlp.down_proj.bias"]
    )
    np.testing.assert_allclose(layers.swiglu(params, x), want, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_einsum_accumulates_in_float32(dtype):
    ones = jnp.ones((3, 4099), dtype)
    got = jax.jit(lambda x: products.einsum("bn,bn->b", x, x))(ones)
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(got, np.full((3,), 4099, np.float32))
