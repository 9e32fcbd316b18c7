"""Products in plain JAX that keep what their operands have: no TF32 for float32."""

import functools
from typing import Any

import jax
import jax.numpy as jnp


def einsum(spec: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """The einsum of two arrays of one dtype, accumulated and returned in float32."""
    product = functools.partial(
        jnp.einsum,
        spec,
        precision=precision(x.dtype),
        preferred_element_type=jnp.float32,
    )
    if x.dtype.itemsize >= 4:
        return product(x, y)

    # XLA:CPU has no such product of 16-bit operands with batch axes. Widened first,
    # they give the same numbers: every product of two is exact in float32.
    def widened(x: jax.Array, y: jax.Array) -> jax.Array:
        return product(x.astype(jnp.float32), y.astype(jnp.float32))

    return jax.lax.platform_dependent(x, y, cpu=widened, default=product)


def precision(dtype: Any) -> jax.lax.Precision:
    """True float32 for float32 operands, the backend's default otherwise."""
    if jnp.dtype(dtype) == jnp.float32:
        return jax.lax.Precision.HIGHEST
    return jax.lax.Precision.DEFAULT
