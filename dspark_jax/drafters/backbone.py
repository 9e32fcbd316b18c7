"""The DFlash backbone: all slots of a block in one pass over the target's features.

Every target token gives one context vector c = norm(fc(taps)), shared by all layers; a
layer's keys and values come from c and from the block through the same projections. The
K rows of a block (the anchor's embedding, then K-1 mask embeddings) see the context
strictly before the anchor and each other, in both directions (paper 3.1).

Decoding (one block per request, context keys cached) and training (A anchors per
sequence, context keys computed in line) run the same code: blocks are an axis A.
"""

from collections.abc import Callable, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dspark_jax import layers
from dspark_jax.config import DrafterConfig


class BackboneParams(flax.struct.PyTreeNode):
    """Parameters of the backbone."""

    fc: jax.Array  # [D, M*D]
    hidden_norm: jax.Array  # [D]
    layers: tuple[layers.BlockParams, ...]
    final_norm: jax.Array  # [D]


def abstract(config: DrafterConfig) -> BackboneParams:
    """Shapes and dtypes of the parameters."""
    dtype = layers.dtype_of(config.param_dtype)

    def array(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    return BackboneParams(
        fc=array(config.width, len(config.tap_layers) * config.width),
        hidden_norm=array(config.width),
        layers=tuple(
            layers.abstract_block(config.block, dtype) for _ in range(config.num_layers)
        ),
        final_norm=array(config.width),
    )


def context_features(
    params: BackboneParams, config: DrafterConfig, taps: Float[Array, "... MD"]
) -> Float[Array, "... D"]:
    """c = RMSNorm(fc(taps)), one vector per target token."""
    taps = taps.astype(layers.dtype_of(config.compute_dtype))
    return layers.rms_norm(
        layers.dot(taps, params.fc), params.hidden_norm, config.block.rms_eps
    )


def context_keys_values(
    params: BackboneParams,
    config: DrafterConfig,
    features: Float[Array, "B S D"],
    positions: Int[Array, "B S"],
) -> list[tuple[Float[Array, "B S G E"], Float[Array, "B S G E"]]]:
    """Each layer's keys and values of the context; c enters without an input norm."""
    return [
        layers.keys_values(block, config.block, features, positions)
        for block in params.layers
    ]


def block_hidden(
    params: BackboneParams,
    config: DrafterConfig,
    inputs: Float[Array, "B A K D"],
    positions: Int[Array, "B A K"],
    context: Sequence[tuple[Float[Array, "B G S E"], Float[Array, "B G S E"]]],
    visible: Bool[Array, "B A S"],
    *,
    in_block: Bool[Array, "B A K"] | None = None,
    attention: Callable = layers.grouped_attention,
) -> Float[Array, "B A K D"]:
    """Hidden states of every slot, after the final norm; slot k predicts a + k + 1.

    Args:
      inputs: embeddings of (anchor, mask, ..., mask) for A blocks per request.
      positions: absolute; a .. a + K - 1.
      context: (keys, values) a layer.
      visible: context tokens that a block sees: those strictly before its anchor.
      in_block: slots that exist, where blocks are of several lengths; None: all.
      attention: a function like `layers.grouped_attention`.
    """
    own = None if in_block is None else in_block[:, :, None]
    x = inputs
    for block_params, (keys, values) in zip(params.layers, context, strict=True):

        def attend(query, key, value, keys=keys, values=values):
            segments = [(keys, values, visible[:, :, None]), (key, value, own)]
            return attention(query, segments), None

        x, _ = layers.block(block_params, config.block, x, positions, attend)
    return layers.rms_norm(x, params.final_norm, config.block.rms_eps)


def cached_block_hidden(
    params: BackboneParams,
    config: DrafterConfig,
    inputs: Float[Array, "B K D"],
    positions: Int[Array, "B K"],
    cache: Any,
) -> tuple[Float[Array, "B K D"], Any]:
    """`block_hidden` of one block a request over its cached context, and the cache.

    Args:
      inputs: embeddings of (anchor, mask, ..., mask).
      positions: absolute; a .. a + K - 1.
      cache: with `attend_block`, a `DenseCache` or a `PagedCache`.
    """
    x, at = inputs[:, None], positions[:, None]  # [B, 1, K, D], [B, 1, K]
    for index, block_params in enumerate(params.layers):

        def attend(query, key, value, index=index, cache=cache):
            rows = (row[:, 0] for row in (query, key, value))
            out, cache = cache.attend_block(index, *rows, positions)
            return out[:, None], cache

        x, cache = layers.block(block_params, config.block, x, at, attend)
    hidden = layers.rms_norm(x, params.final_norm, config.block.rms_eps)
    return hidden[:, 0], cache


def block_inputs(
    config: DrafterConfig, anchor: Int[Array, "..."], length: int
) -> Int[Array, "... K"]:
    """Token ids of a block: the anchor, then masks."""
    masks = jnp.full((*anchor.shape, length - 1), config.mask_token, jnp.int32)
    return jnp.concatenate([anchor[..., None].astype(jnp.int32), masks], axis=-1)
