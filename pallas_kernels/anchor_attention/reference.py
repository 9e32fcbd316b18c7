"""The definition: one softmax over the context before the anchor and the own block."""

import jax
import jax.numpy as jnp

from pallas_kernels import products


def attend(
    query: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    own_keys: jax.Array,
    own_values: jax.Array,
    num_context: jax.Array,
    present: jax.Array,
    scale: float,
) -> jax.Array:
    """Attention output [B, A, K, H, E]; shapes as in `api.anchor_attention`."""
    batch, anchors, slots, heads, width = query.shape
    kv_heads, length = keys.shape[1], keys.shape[2]
    grouped = query.reshape(batch, anchors, slots, kv_heads, -1, width)
    context = products.einsum("bakghe,bgse->bagkhs", grouped, keys)
    own = products.einsum("bakghe,bajge->bagkhj", grouped, own_keys)
    index = jnp.arange(length, dtype=jnp.int32)
    before = index[None, None] < num_context[..., None]  # [B, A, S]
    seen = jnp.concatenate([before, present], axis=-1)[:, :, None, None, None]
    scores = jnp.concatenate([context, own], axis=-1) * jnp.float32(scale)
    # finfo.min, not -inf: a row that sees nothing must stay finite.
    weights = jax.nn.softmax(
        jnp.where(seen, scores, jnp.finfo(jnp.float32).min), axis=-1
    )
    weights = weights.astype(values.dtype)
    out = products.einsum("bagkhs,bgse->bakghe", weights[..., :length], values)
    out += products.einsum("bagkhj,bajge->bakghe", weights[..., length:], own_values)
    return out.reshape((*query.shape[:3], heads, width)).astype(query.dtype)
