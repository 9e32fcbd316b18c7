"""Attention of A blocks of K rows a sequence: the training form of a draft block."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import _dispatch
from pallas_kernels.anchor_attention import (
    chunks,
    joined,
    mosaic_gpu,
    reference,
    tuning,
)

# The first is the fastest (docs/kernels.md).
PREFERRED: dict[str, tuple[str, ...]] = {"gpu": ("mosaic_gpu", "cudnn")}
Config = tuning.ChunksConfig | tuning.MosaicGpuConfig


def anchor_attention(
    query: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    own_keys: jax.Array,
    own_values: jax.Array,
    *,
    num_context: jax.Array,
    present: jax.Array | None = None,
    kept: jax.Array | None = None,
    scale: float | None = None,
    implementation: str | None = None,
    config: Config | None = None,
) -> jax.Array:
    """Rows see the context strictly before their anchor, and their own block.

    Differentiable in all arrays of numbers. Memory is linear in S and in A * K.

    Args:
      query: [B, A, K, H, E].
      keys: [B, G, S, E], shared by the blocks of a sequence.
      values: as keys.
      own_keys: [B, A, K, G, E].
      own_values: as own_keys.
      num_context: int32 [B, A], keys of the context that a block sees: its anchor's
        position.
      present: bool [B, A, K], slots that exist; None = all.
      kept: bool [B, A]; a dropped anchor's rows are zero and get no gradient; None =
        all are kept.
      scale: factor of the scores; None = E**-0.5.
      implementation: "xla", "cudnn" or "mosaic_gpu" (NVIDIA's Hopper); None = the
        first that can run these arrays on the default backend.
      config: that implementation's settings, `tuning.MosaicGpuConfig` or, for the
        others, how many anchors are taken at a time.

    Returns:
      [B, A, K, H, E], in the query's dtype.

    Raises:
      ValueError: shapes that don't fit one another, or an unknown implementation.
      TypeError: the settings are another implementation's.
      NotImplementedError: the named implementation can't run these arrays.
    """
    _check(query, keys, values, own_keys, own_values, num_context, present, kept)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    tiles = config if isinstance(config, tuning.MosaicGpuConfig) else None
    refusals: dict[str, _dispatch.Refusal] = {
        "xla": lambda: None,
        "cudnn": lambda: joined.supports(query, keys),
        "mosaic_gpu": lambda: mosaic_gpu.supports(
            query, keys, scale=scale, config=tiles
        ),
    }
    if implementation is None:
        refusals["mosaic_gpu"] = _dispatch.first_of(
            _dispatch.needs_hopper,
            lambda: "the settings are another's" if tiles is not config else None,
            refusals["mosaic_gpu"],
        )
    name = _dispatch.choose(implementation, refusals, PREFERRED)
    _check_config(name, config)
    if present is None:
        present = jnp.ones(query.shape[:3], jnp.bool_)
    arrays = (query, keys, values, own_keys, own_values, num_context, present)
    if name == "mosaic_gpu":
        if kept is None:
            kept = jnp.ones(query.shape[:2], jnp.bool_)
        return mosaic_gpu.attend(*arrays, kept, scale, config=tiles)
    settings = config if isinstance(config, tuning.ChunksConfig) else None
    settings = tuning.ChunksConfig() if settings is None else settings
    function: Callable[..., jax.Array] = reference.attend
    if name == "cudnn":
        function = functools.partial(
            joined.attend, skips_context=settings.skips_context
        )
    out = chunks.attend(function, *arrays, scale, anchors=settings.anchors)
    if kept is None:
        return out
    return jnp.where(kept[:, :, None, None, None], out, jnp.zeros_like(out))


def _check_config(name: str, config: Config | None) -> None:
    wanted = {"mosaic_gpu": tuning.MosaicGpuConfig}.get(name, tuning.ChunksConfig)
    if config is not None and not isinstance(config, wanted):
        raise TypeError(
            f"`config` of implementation {name!r} must be a {wanted.__name__}, got "
            f"{config}"
        )


def _check(
    query: Any,
    keys: Any,
    values: Any,
    own_keys: Any,
    own_values: Any,
    num_context: Any,
    present: Any,
    kept: Any,
) -> None:
    if query.ndim != 5:
        raise ValueError(f"`query` must have 5 axes, got shape {query.shape}")
    batch, anchors, slots, heads, width = query.shape
    if keys.ndim != 4 or (keys.shape[0], keys.shape[3]) != (batch, width):
        raise ValueError(
            f"`keys` must have shape (B, G, S, E) = ({batch}, G, S, {width}), got "
            f"{keys.shape}"
        )
    kv_heads = keys.shape[1]
    if heads % kv_heads:
        raise ValueError(
            f"query heads must be a multiple of kv heads, got {heads} and {kv_heads}"
        )
    own = (batch, anchors, slots, kv_heads, width)
    expected = {
        "values": (values, keys.shape, keys.dtype),
        "own_keys": (own_keys, own, keys.dtype),
        "own_values": (own_values, own, keys.dtype),
        "num_context": (num_context, (batch, anchors), jnp.int32),
        "present": (present, (batch, anchors, slots), jnp.bool_),
        "kept": (kept, (batch, anchors), jnp.bool_),
    }
    for name, (array, shape, dtype) in expected.items():
        if array is not None and (array.shape != shape or array.dtype != dtype):
            raise ValueError(
                f"`{name}` must be {jnp.dtype(dtype).name} of shape {shape}, got "
                f"{array.dtype} {array.shape}"
            )
