"""A few anchors at a time: memory linear in the context and in the blocks' rows.

A scan over chunks of anchors recomputes each chunk in the backward pass, so that only
its inputs are kept. The gradients of the shared context are summed in float32.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp


def attend(
    function: Callable[..., jax.Array],
    query: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    own_keys: jax.Array,
    own_values: jax.Array,
    num_context: jax.Array,
    present: jax.Array,
    scale: float,
    *,
    anchors: int,
) -> jax.Array:
    """`function` of the same arguments, `anchors` of them at a time."""
    total = query.shape[1]
    count = -(-total // anchors)
    if count <= 1:
        return function(
            query, keys, values, own_keys, own_values, num_context, present, scale
        )
    dtype = keys.dtype
    # Widened here and narrowed inside: the numbers are the same, and the transposed
    # scan adds up float32.
    wide = keys.astype(jnp.float32), values.astype(jnp.float32)

    def split(array: jax.Array) -> jax.Array:  # [B, A, ...] -> [count, B, anchors, ...]
        widths = [(0, 0)] * array.ndim
        widths[1] = (0, count * anchors - total)
        array = jnp.pad(array, widths)
        shape = (array.shape[0], count, anchors, *array.shape[2:])
        return jnp.moveaxis(array.reshape(shape), 1, 0)

    @jax.checkpoint
    def one(shared: tuple[jax.Array, jax.Array], chunk: tuple) -> jax.Array:
        narrow = [array.astype(dtype) for array in shared]
        query, own_keys, own_values, num_context, present = chunk
        return function(
            query, *narrow, own_keys, own_values, num_context, present, scale
        )

    pieces = tuple(map(split, (query, own_keys, own_values, num_context, present)))
    _, out = jax.lax.scan(lambda _, chunk: (None, one(wide, chunk)), None, pieces)
    out = jnp.moveaxis(out, 0, 1)  # [B, count, anchors, K, H, E]
    return out.reshape(out.shape[0], count * anchors, *out.shape[3:])[:, :total]
