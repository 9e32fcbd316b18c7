"""The sequential head: a low-rank bias from the previous token (paper 3.1, eq. 5).

All three kinds have the form bias_k = W2 f_k with a feature f_k in R^R:

  vanilla  f = W1[prev]
  gated    f = sigmoid(Wg [h; W1[prev]] + bg) * W1[prev]
  rnn      [g; c; o] = Wj [s; W1[prev]; h] + bj,  f = tanh(o),
           s' = sigmoid(g) * s + (1 - sigmoid(g)) * tanh(c),  s_0 = 0

(The paper has no biases bg, bj; DeepSpec's checkpoints do.)
"""

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dspark_jax import layers
from dspark_jax.config import DrafterConfig
from pallas_kernels import products


class MarkovParams(flax.struct.PyTreeNode):
    """W1 and W2 of every kind; the projection of the gated and rnn kinds."""

    w1: jax.Array  # [V, R]
    w2: jax.Array  # [V, R]
    projection: jax.Array | None = None  # gated [R, D + R], rnn [3R, 2R + D]
    projection_bias: jax.Array | None = None  # gated [R], rnn [3R]


def abstract(config: DrafterConfig) -> MarkovParams | None:
    """Shapes and dtypes of the parameters; None without a head."""
    if config.markov_kind == "none":
        return None
    dtype = layers.dtype_of(config.param_dtype)
    rank = config.markov_rank
    table = jax.ShapeDtypeStruct((config.vocab_size, rank), dtype)
    shapes = {
        "vanilla": None,
        "gated": (rank, config.width + rank),
        "rnn": (3 * rank, 2 * rank + config.width),
    }
    shape = shapes[config.markov_kind]
    return MarkovParams(
        w1=table,  # type: ignore[arg-type]
        w2=table,  # type: ignore[arg-type]
        projection=None if shape is None else jax.ShapeDtypeStruct(shape, dtype),  # type: ignore[arg-type]
        projection_bias=None
        if shape is None
        else jax.ShapeDtypeStruct(shape[:1], dtype),  # type: ignore[arg-type]
    )


def initial_state(config: DrafterConfig, batch_shape: tuple[int, ...]) -> jax.Array:
    """s_0 = 0 in R^R (only the rnn kind uses it)."""
    dtype = layers.dtype_of(config.compute_dtype)
    return jnp.zeros((*batch_shape, config.markov_rank), dtype)


def embedding(
    params: MarkovParams, config: DrafterConfig, previous: Int[Array, "..."]
) -> Float[Array, "... R"]:
    """W1[prev]."""
    return layers.embed(params.w1, previous, layers.dtype_of(config.compute_dtype))


def feature(
    params: MarkovParams,
    config: DrafterConfig,
    hidden: Float[Array, "... D"],
    previous_embedding: Float[Array, "... R"],
    state: Float[Array, "... R"],
) -> tuple[Float[Array, "... R"], Float[Array, "... R"]]:
    """f_k and the next state, from h_k, W1[prev] and the state before slot k."""
    if config.markov_kind == "vanilla":
        return previous_embedding, state
    assert params.projection is not None
    if config.markov_kind == "gated":
        joined = jnp.concatenate([hidden, previous_embedding], axis=-1)
        gate = layers.dot(joined, params.projection, params.projection_bias)
        return jax.nn.sigmoid(gate) * previous_embedding, state
    joined = jnp.concatenate([state, previous_embedding, hidden], axis=-1)
    projected = layers.dot(joined, params.projection, params.projection_bias)
    gate, candidate, output = jnp.split(projected, 3, axis=-1)
    gate = jax.nn.sigmoid(gate)
    # The output uses the old state: s_k first matters at slot k + 1.
    return jnp.tanh(output), gate * state + (1 - gate) * jnp.tanh(candidate)


def features(
    params: MarkovParams,
    config: DrafterConfig,
    hidden: Float[Array, "... K D"],
    previous_embedding: Float[Array, "... K R"],
) -> Float[Array, "... K R"]:
    """f of all slots with the previous tokens given (training)."""
    if config.markov_kind != "rnn":
        unused = initial_state(config, hidden.shape[:-1])
        return feature(params, config, hidden, previous_embedding, unused)[0]
    state = initial_state(config, hidden.shape[:-2])
    outputs = []
    for slot in range(hidden.shape[-2]):
        output, state = feature(
            params,
            config,
            hidden[..., slot, :],
            previous_embedding[..., slot, :],
            state,
        )
        outputs.append(output)
    return jnp.stack(outputs, axis=-2)


def transition_bias(
    w2: Float[Array, "N R"], feature: Float[Array, "... R"]
) -> Float[Array, "... N"]:
    """bias = W2 f, float32, for the rows of W2 that are given."""
    return layers.unembed(feature, w2)


def candidate_bias(
    w2: Float[Array, "V R"], feature: Float[Array, "B R"], rows: Int[Array, "B N"]
) -> Float[Array, "B N"]:
    """bias = W2[rows] f, float32, for a few rows per request."""
    gathered = jnp.take(w2, rows, axis=0, mode="clip").astype(
        feature.dtype
    )  # [B, N, R]
    return products.einsum("bnr,br->bn", gathered, feature)
