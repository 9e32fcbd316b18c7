"""The confidence head: how likely slot k survives, given that the slots before did.

c_k = sigmoid(w . [h_k; W1[x_{k-1}]] + b) (paper eq. 7; DeepSpec adds the bias b). Its
training label is the acceptance rate 1 - |p_d - p_t|_1 / 2.
"""

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dspark_jax import layers
from dspark_jax.config import DrafterConfig
from pallas_kernels import products


class ConfidenceParams(flax.struct.PyTreeNode):
    """One linear map to a logit."""

    weight: jax.Array  # [D] or [D + R]
    bias: jax.Array  # []


def abstract(config: DrafterConfig) -> ConfidenceParams | None:
    """Shapes and dtypes of the parameters; None without a head."""
    if config.confidence_kind == "none":
        return None
    size = config.width
    if config.confidence_kind == "markov":
        size += config.markov_rank
    dtype = layers.dtype_of(config.param_dtype)
    return ConfidenceParams(
        weight=jax.ShapeDtypeStruct((size,), dtype),  # type: ignore[arg-type]
        bias=jax.ShapeDtypeStruct((), dtype),  # type: ignore[arg-type]
    )


def logits(
    params: ConfidenceParams,
    config: DrafterConfig,
    hidden: Float[Array, "... D"],
    previous_embedding: Float[Array, "... R"] | None,
) -> Float[Array, "..."]:
    """Confidence logits, float32."""
    inputs = hidden
    if config.confidence_kind == "markov":
        assert previous_embedding is not None
        inputs = jnp.concatenate([hidden, previous_embedding], axis=-1)
    weight = params.weight.astype(inputs.dtype)
    value = products.einsum("...d,d->...", inputs, weight)
    return value + params.bias.astype(jnp.float32)
