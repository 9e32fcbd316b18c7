"""Blocks of a sequence side by side in one masked flash attention (cuDNN's, say).

Their rows see [all blocks' own rows; context] under a mask that keeps blocks apart.
The scores between blocks are computed in vain, which is cheap while a call takes few
blocks: `chunks` gives it a few at a time.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp

# cuDNN's masked backward pass wants even numbers of rows and keys.
MULTIPLE = 2


def attend(
    query: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    own_keys: jax.Array,
    own_values: jax.Array,
    num_context: jax.Array,
    present: jax.Array,
    scale: float,
    *,
    implementation: Literal["xla", "cudnn"] = "cudnn",
    skips_context: bool = True,
) -> jax.Array:
    """Attention output [B, A, K, H, E]; shapes as in `api.anchor_attention`.

    Args:
      skips_context: give the kernel the number of keys that any row sees, so that it
        does not read the rest of the context: half of it where a call's anchors are
        neighbours.
    """
    batch, anchors, slots, heads, width = query.shape
    rows, length = anchors * slots, keys.shape[2]

    def lay(shared: jax.Array, own: jax.Array) -> jax.Array:  # [B, A*K + S, G, E]
        own = own.reshape(batch, rows, *own.shape[3:])
        return jnp.concatenate([own, jnp.swapaxes(shared, 1, 2)], axis=1)

    index = jnp.arange(length, dtype=jnp.int32)
    block = jnp.arange(rows, dtype=jnp.int32) // slots
    limit = jnp.repeat(num_context, slots, axis=1)  # [B, A*K]
    seen = index[None, None] < limit[..., None]
    own = (block[:, None] == block[None])[None] & present.reshape(batch, 1, rows)
    mask = jnp.concatenate([own, seen], axis=-1)  # [B, A*K, A*K + S]
    lengths = None
    if skips_context:
        lengths = rows + jnp.max(num_context, axis=1)
    out = jax.nn.dot_product_attention(
        _pad(query.reshape(batch, rows, heads, width)),
        _pad(lay(keys, own_keys)),
        _pad(lay(values, own_values)),
        mask=_pad(_pad(mask), axis=2)[:, None],
        scale=scale,
        implementation=implementation,
        key_value_seq_lengths=lengths,
    )
    return out[:, :rows].reshape(query.shape)


def supports(query: Any, keys: Any) -> str | None:
    """Why cuDNN can't run these arrays, or None if it can."""
    if query.dtype not in (jnp.bfloat16, jnp.float16) or keys.dtype != query.dtype:
        return (
            "cuDNN takes bfloat16 or float16 keys and queries of one dtype, got "
            f"{query.dtype} and {keys.dtype}"
        )
    if query.shape[-1] % 8 or query.shape[-1] > 128:
        return (
            f"head width must be a multiple of 8 and at most 128, got {query.shape[-1]}"
        )
    return None


def _pad(array: jax.Array, axis: int = 1) -> jax.Array:
    # With rows of zeros, or of False: such a row's softmax is over equal scores.
    spare = -array.shape[axis] % MULTIPLE
    if not spare:
        return array
    widths = [(0, 0)] * array.ndim
    widths[axis] = (0, spare)
    return jnp.pad(array, widths)
