"""Attention of many blocks a sequence over one context, for training.

Same arguments and same result as `layers.grouped_attention` with two segments: the
context, shared by the sequence's blocks, and each block's own rows. `cudnn` lays all
blocks of a sequence side by side and lets one masked flash attention do both; the mask
keeps blocks apart. It computes the scores between blocks in vain, which is cheap while
A*K is of the size of S.
"""

from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Segments = Sequence[tuple[jax.Array, jax.Array, jax.Array | None]]


def cudnn(
    query: Float[Array, "B A K H E"], segments: Segments
) -> Float[Array, "B A K H E"]:
    """Flash attention of cuDNN (an NVIDIA GPU, bfloat16 or float16)."""
    return joined(query, segments, "cudnn")


def joined(
    query: Float[Array, "B A K H E"],
    segments: Segments,
    implementation: Literal["xla", "cudnn"],
) -> Float[Array, "B A K H E"]:
    """One `jax.nn.dot_product_attention` over context and blocks side by side."""
    (keys, values, visible), (own_keys, own_values, in_block) = segments
    batch, anchors, slots, heads, width = query.shape
    rows = anchors * slots
    context = keys.shape[2]

    def lay(shared, own):  # [B, S + A*K, G, E]
        own = own.reshape(batch, rows, *own.shape[3:])
        return jnp.concatenate([jnp.swapaxes(shared, 1, 2), own], axis=1)

    assert visible is not None  # a block never sees its own anchor's state
    seen = jnp.broadcast_to(visible, (batch, anchors, slots, context))
    block = jnp.arange(rows, dtype=jnp.int32) // slots
    own_mask = jnp.broadcast_to(block[:, None] == block[None], (batch, rows, rows))
    if in_block is not None:
        own_mask = own_mask & in_block.reshape(batch, 1, rows)
    mask = jnp.concatenate([seen.reshape(batch, rows, context), own_mask], axis=-1)
    query, mask, odd = _pad_rows(query.reshape(batch, rows, heads, width), mask)
    stacked_keys, stacked_values = lay(keys, own_keys), lay(values, own_values)
    stacked_keys, stacked_values, mask = _pad_keys(stacked_keys, stacked_values, mask)
    out = jax.nn.dot_product_attention(
        query,
        stacked_keys,
        stacked_values,
        mask=mask[:, None],
        implementation=implementation,
    )
    out = out[:, :-1] if odd else out
    return out.reshape(batch, anchors, slots, heads, width)


def _pad_rows(query: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array, bool]:
    # cuDNN's masked backward pass wants even numbers of rows and keys.
    if query.shape[1] % 2 == 0:
        return query, mask, False
    query = jnp.pad(query, ((0, 0), (0, 1), (0, 0), (0, 0)))
    return query, jnp.pad(mask, ((0, 0), (0, 1), (0, 0)), constant_values=True), True


def _pad_keys(
    keys: jax.Array, values: jax.Array, mask: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    if keys.shape[1] % 2 == 0:
        return keys, values, mask
    pad = ((0, 0), (0, 1), (0, 0), (0, 0))
    return (
        jnp.pad(keys, pad),
        jnp.pad(values, pad),
        jnp.pad(mask, ((0, 0),) * 2 + ((0, 1),)),
    )
