"""Layers where sizes or dtypes decide which code the backend runs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import layers
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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_einsum_accumulates_in_float32(dtype):
    ones = jnp.ones((3, 4099), dtype)
    got = jax.jit(lambda x: products.einsum("bn,bn->b", x, x))(ones)
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(got, np.full((3,), 4099, np.float32))
