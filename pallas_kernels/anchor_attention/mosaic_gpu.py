"""Kernels for NVIDIA's Hopper, in Pallas's Mosaic GPU dialect, forward and backward.

Arrays are read and written where they lie; beside the output, only two numbers a row
are kept or made. Sums of gradients are float32 in registers, in a fixed order.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import _compat
from pallas_kernels.anchor_attention import (
    mosaic_gpu_context,
    mosaic_gpu_forward,
    mosaic_gpu_plan,
    mosaic_gpu_rows,
)
from pallas_kernels.anchor_attention.mosaic_gpu_plan import ROWS, Shape
from pallas_kernels.anchor_attention.tuning import MosaicGpuConfig

SHARED_MEMORY = 232_448  # bytes a block may have on Hopper


def supports(
    query: Any,
    keys: Any,
    *,
    scale: float = 1.0,
    config: MosaicGpuConfig | None = None,
) -> str | None:
    """Why the kernels can't run these arrays, or None if they can.

    Args:
      query: [B, A, K, H, E]; only its shape and dtype are read.
      keys: [B, G, S, E], likewise.
      scale: factor of the scores.
      config: None = the default for these shapes.
    """
    if (missing := _compat.mosaic_gpu_missing()) is not None:
        return missing
    if query.dtype != jnp.bfloat16 or keys.dtype != query.dtype:
        return (
            "wgmma multiplies bfloat16 keys and queries, got "
            f"{query.dtype} and {keys.dtype}"
        )
    if query.shape[-1] not in (64, 128):
        return f"head width must be 64 or 128, got {query.shape[-1]}"
    slots, heads = query.shape[2:4]
    group = heads // keys.shape[1]
    slot_rows = mosaic_gpu_plan.padded_slots(slots)
    if group * slot_rows > ROWS:
        return (
            f"a block's rows of one kv head must fit a tile of {ROWS}, got {group} "
            f"query heads of {slot_rows} rows"
        )
    if not scale > 0:
        return f"the scale must be positive, got {scale}"
    shape = shape_of(query, keys)
    config = default_config(shape) if config is None else config
    for module in (mosaic_gpu_forward, mosaic_gpu_rows, mosaic_gpu_context):
        needed = module.shared_memory(shape, config)
        if needed > SHARED_MEMORY:
            return (
                f"{config} needs {needed} bytes of shared memory, the limit is "
                f"{SHARED_MEMORY}"
            )
    return None


def default_config(shape: Shape) -> MosaicGpuConfig:
    """What is known to be good for these shapes."""
    for key_tile, stages in ((128, 2), (64, 4), (64, 2)):
        config = MosaicGpuConfig(key_tile=key_tile, stages=stages)
        if mosaic_gpu_forward.shared_memory(shape, config) <= SHARED_MEMORY:
            break
    return config


def shape_of(query: Any, keys: Any) -> Shape:
    """The shape that the kernels are compiled for."""
    batch, anchors, slots, heads, width = query.shape
    group = heads // keys.shape[1]
    blocks = ROWS // (group * mosaic_gpu_plan.padded_slots(slots))
    return Shape(
        batch=batch,
        anchors=anchors,
        slots=stored_slots(slots),
        kv_heads=keys.shape[1],
        group=group,
        width=width,
        length=padded_length(keys.shape[2]),
        tiles=2 * -(-anchors // (2 * blocks)),
    )


def stored_slots(slots: int) -> int:
    """A block's rows: beyond one tile of 8 they fill whole ones."""
    return slots if slots <= 8 else -(-slots // 8) * 8


def padded_length(length: int) -> int:
    """The context's length, to the next multiple of 8: copies are tiles of 8 rows."""
    return -(-length // 8) * 8


class Static(NamedTuple):
    """What is not an array."""

    shape: Shape
    config: MosaicGpuConfig
    scale: float
    interpret: Any


def attend(
    query: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    own_keys: jax.Array,
    own_values: jax.Array,
    num_context: jax.Array,
    present: jax.Array,
    kept: jax.Array,
    scale: float,
    *,
    config: MosaicGpuConfig | None = None,
    interpret: Any = None,
) -> jax.Array:
    """Attention output [B, A, K, H, E]; shapes as in `api.anchor_attention`."""
    shape = shape_of(query, keys)
    config = default_config(shape) if config is None else config
    num_context = jnp.minimum(num_context, keys.shape[2])
    slots = query.shape[2]
    if more := shape.slots - slots:
        widths = ((0, 0), (0, 0), (0, more), (0, 0), (0, 0))
        query, own_keys, own_values = (
            jnp.pad(array, widths) for array in (query, own_keys, own_values)
        )
        present = jnp.pad(present, widths[:3])  # False
    plan = mosaic_gpu_plan.make(num_context, present, kept, shape=shape)
    if more := shape.length - keys.shape[2]:
        widths = ((0, 0), (0, 0), (0, more), (0, 0))
        keys, values = jnp.pad(keys, widths), jnp.pad(values, widths)

    def flat(array: jax.Array) -> jax.Array:
        return array.reshape(-1, *array.shape[2:])

    arrays = (query, keys, values, own_keys, own_values)
    static = Static(shape, config, float(scale), interpret)
    out = _attend(*map(flat, arrays), plan, static)
    return out.reshape(query.shape)[:, :, :slots]


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def _attend(query, keys, values, own_keys, own_values, plan, static):
    arrays = (query, keys, values, own_keys, own_values)
    return _forward(*arrays, plan, static)[0]


def _forward(query, keys, values, own_keys, own_values, plan, static):
    arrays = (query, keys, values, own_keys, own_values)
    out, sums = mosaic_gpu_forward.attend(*arrays, plan, **static._asdict())
    return out, (arrays, out, sums, plan)


def _backward(static, residuals, slopes):
    arrays, out, sums, plan = residuals
    query, keys, values, own_keys, own_values = arrays
    query_slopes, own_keys_slopes, own_values_slopes, delta = mosaic_gpu_rows.gradients(
        query,
        keys,
        values,
        own_keys,
        own_values,
        out,
        slopes,
        sums,
        plan,
        **static._asdict(),
    )
    keys_slopes, values_slopes = mosaic_gpu_context.gradients(
        query, keys, values, slopes, sums, delta, plan, **static._asdict()
    )
    nothing = jax.tree.map(lambda x: np.zeros(x.shape, jax.dtypes.float0), plan)
    return (
        query_slopes,
        keys_slopes,
        values_slopes,
        own_keys_slopes,
        own_values_slopes,
        nothing,
    )


_attend.defvjp(_forward, _backward)
