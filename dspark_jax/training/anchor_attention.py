"""Attention of many blocks a sequence over one context, for training.

Same arguments and same result as `layers.grouped_attention` with two segments: the
context, shared by the sequence's blocks, and each block's own rows. The work is
`pallas_kernels.anchor_attention`'s, a few anchors at a time.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import anchor_attention

Segments = Sequence[tuple[jax.Array, jax.Array, jax.Array | None]]


def cudnn(
    query: Float[Array, "B A K H E"], segments: Segments
) -> Float[Array, "B A K H E"]:
    """Flash attention of cuDNN (an NVIDIA GPU, bfloat16 or float16)."""
    return by_anchor(query, segments, "cudnn")


def by_anchor(
    query: Float[Array, "B A K H E"], segments: Segments, implementation: str
) -> Float[Array, "B A K H E"]:
    """`pallas_kernels.anchor_attention` of two segments.

    Args:
      segments: the context, whose `visible` [B, A, 1, S] must be a prefix of it (the
        keys before the anchor), and the blocks' own rows.
      implementation: of `anchor_attention`.
    """
    (keys, values, visible), (own_keys, own_values, in_block) = segments
    assert visible is not None  # a block never sees its own anchor's state
    return anchor_attention.anchor_attention(
        query,
        keys,
        values,
        own_keys,
        own_values,
        num_context=jnp.sum(visible[:, :, 0], axis=-1, dtype=jnp.int32),
        present=None if in_block is None else in_block[:, :, 0],
        implementation=implementation,
    )
