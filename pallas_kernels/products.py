"""Products of the definitions in plain JAX: float32 is float32 (no TF32)."""

import functools

import jax
import jax.numpy as jnp


def einsum(spec: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """The einsum of two arrays of one dtype, accumulated and returned in float32."""
    highest = x.dtype == jnp.float32
    product = functools.partial(
        jnp.einsum,
        spec,
        precision=jax.lax.Precision.HIGHEST if highest else None,
        preferred_element_type=jnp.float32,
    )
    if highest:
        return product(x, y)

    # XLA:CPU has no such product of 16-bit operands with batch axes. Widened first,
    # they give the same numbers: every product of two is exact in float32.
    def widened(x: jax.Array, y: jax.Array) -> jax.Array:
        return product(x.astype(jnp.float32), y.astype(jnp.float32))

    return jax.lax.platform_dependent(x, y, cpu=widened, default=product)
