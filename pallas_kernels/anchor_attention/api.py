"""Attention of A blocks of K rows a sequence: the training form of a draft block."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import _compat, _dispatch
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
        first of `PREFERRED` that can run these arrays on this machine, or "xla".
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
    refusals = _refusals(query, keys, scale, config)
    if implementation is None:
        for each, refusal in refusals.items():
            refusals[each] = _dispatch.first_of(
                functools.partial(unavailable, each),
                functools.partial(_other_settings, each, config),
                refusal,
            )
    name = _dispatch.choose(implementation, refusals, PREFERRED)
    _check_config(name, config)
    if present is None:
        present = jnp.ones(query.shape[:3], jnp.bool_)
    arrays = (query, keys, values, own_keys, own_values, num_context, present)
    if name == "mosaic_gpu":
        if kept is None:
            kept = jnp.ones(query.shape[:2], jnp.bool_)
        tiles = config if isinstance(config, tuning.MosaicGpuConfig) else None
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


def supports(name: str, query: Any, keys: Any) -> str | None:
    """Why this implementation can't run such arrays, or None if it can.

    Args:
      query: [B, A, K, H, E]; only its shape and dtype are read, and neither B nor A.
      keys: [B, G, S, E], likewise without S.
    """
    return _refusals(query, keys, query.shape[-1] ** -0.5, None)[name]()


def unavailable(name: str, *, in_shard_map: bool = False) -> str | None:
    """Why this implementation isn't chosen on this machine, or None if it may be.

    Args:
      in_shard_map: the call will be inside `jax.shard_map`, wherever this one is.
    """
    if name == "xla":
        return None
    if name == "cudnn":
        major, minor = _dispatch.compute_capability()
        if major < 8:
            return f"needs compute capability 8.0, got {major}.{minor}"
        return None
    if (reason := _dispatch.needs_hopper()) is not None:
        return reason
    if not in_shard_map and not _compat.is_unpartitioned():
        return f"on one of {jax.device_count()} devices it must be inside `shard_map`"
    return None


def _refusals(
    query: Any, keys: Any, scale: float, config: Config | None
) -> dict[str, _dispatch.Refusal]:
    """By implementation, what looks at the arrays."""
    tiles = config if isinstance(config, tuning.MosaicGpuConfig) else None
    return {
        "xla": lambda: None,
        "cudnn": lambda: joined.supports(query, keys),
        "mosaic_gpu": lambda: mosaic_gpu.supports(
            query, keys, scale=scale, config=tiles
        ),
    }


def _settings_of(name: str) -> type[Config]:
    return tuning.MosaicGpuConfig if name == "mosaic_gpu" else tuning.ChunksConfig


def _other_settings(name: str, config: Config | None) -> str | None:
    if config is None or isinstance(config, _settings_of(name)):
        return None
    return f"the settings are a {type(config).__name__}"


def _check_config(name: str, config: Config | None) -> None:
    if _other_settings(name, config) is not None:
        raise TypeError(
            f"`config` of implementation {name!r} must be a "
            f"{_settings_of(name).__name__}, got {config}"
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
