"""Products of rows in the forms that backends like: all are one product."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import products


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 48, 513])
@pytest.mark.parametrize("shape", [(192, 576), (6, 1536), (101, 576), (6, 5), (8, 64)])
def test_every_number_of_rows_and_width_gives_the_product(rows, shape):
    """Rows are padded, and rows of weights joined where their number allows it."""
    random = np.random.default_rng(rows)
    weight = random.normal(size=shape).astype(np.float32)
    x = random.normal(size=(1, rows, shape[1])).astype(np.float32)
    got = jax.jit(lambda x, w: products.product(x, w, jnp.float32))(x, weight)
    want = x.astype(np.float64) @ weight.astype(np.float64).T
    assert got.shape == (1, rows, shape[0])
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, want, atol=3e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("rows", [1, 7, 8])
def test_products_of_16_bits(dtype, rows):
    random = np.random.default_rng(0)
    weight = jnp.asarray(random.normal(size=(192, 576)), dtype)
    x = jnp.asarray(random.normal(size=(rows, 576)), dtype)
    got = jax.jit(lambda x, w: products.product(x, w, jnp.float32))(x, weight)
    want = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    np.testing.assert_allclose(got, want, atol=2e-3)


@pytest.mark.parametrize(
    ("rows", "dtype", "width", "run"),
    [
        (1, "bfloat16", 2048, 8),
        (7, "float16", 2048, 8),
        (9, "bfloat16", 2048, 9),
        (1, "bfloat16", 1024, 1),
        (1, "float32", 2048, 1),
    ],
)
def test_few_rows_of_16_bits_are_8_on_a_gpu_if_the_matrix_is_large(
    rows, dtype, width, run
):
    x = jax.ShapeDtypeStruct((rows, width), dtype)
    weight = jax.ShapeDtypeStruct((1024, width), dtype)
    traced = jax.jit(lambda x, w: products.product(x, w, jnp.float32)).trace(x, weight)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    (product,) = (line for line in text.splitlines() if "dot_general" in line)
    assert product.rstrip().endswith(f"-> tensor<{run}x1024xf32>")


def test_rows_do_not_reach_each_other():
    """A row that is not finite stays alone: requests of a batch share products."""
    x = jnp.ones((8, 576), jnp.float32).at[3].set(jnp.nan)
    weight = jnp.ones((192, 576), jnp.float32)
    got = np.asarray(products.product(x, weight, jnp.float32))
    assert np.isnan(got[3]).all()
    np.testing.assert_array_equal(np.delete(got, 3, axis=0), 576)


def test_gradients_are_those_of_the_product():
    random = np.random.default_rng(0)
    weight = jnp.asarray(random.normal(size=(6, 64)), jnp.float32)
    x = jnp.asarray(random.normal(size=(7, 64)), jnp.float32)

    def loss(x, weight):
        return jnp.sum(products.product(x, weight, jnp.float32) ** 2)

    def plain(x, weight):
        return jnp.sum(jnp.matmul(x, weight.T, precision="highest") ** 2)

    got, want = (jax.grad(f, argnums=(0, 1))(x, weight) for f in (loss, plain))
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-3)
