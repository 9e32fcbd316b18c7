"""Checks of shapes, dtypes and keys at the top of public functions.

Every message names the argument, the rule and what was given.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Of all noise, whatever the default of the process is.
KEY_IMPLEMENTATION = "threefry2x32"
INT32_MAX = 2**31 - 1


def check_shape(name: str, array: Any, dims: str, shape: tuple[int, ...]) -> None:
    """Raises ValueError unless `array.shape == shape`; `dims` names it, "B K V"."""
    if tuple(array.shape) != tuple(shape):
        raise ValueError(
            f"`{name}` must have shape ({', '.join(dims.split())}) = {tuple(shape)}, "
            f"got {tuple(array.shape)}"
        )


def check_rank(name: str, array: Any, dims: str) -> None:
    """Raises ValueError unless `array` has as many axes as `dims` has names."""
    if array.ndim != len(dims.split()):
        raise ValueError(
            f"`{name}` must have {len(dims.split())} axes ({dims}), got shape "
            f"{tuple(array.shape)}"
        )


def check_drafter_fits(drafter_config: Any, target_config: Any) -> None:
    """Raises ValueError unless a drafter is one for this target, naming what differs.

    Compared is what the drafter's configuration has; fingerprints if neither is empty.
    """
    for name, theirs in (
        ("vocab_size", target_config.vocab_size),
        ("width", target_config.width),
        ("num_target_layers", target_config.num_layers),
        ("target_fingerprint", target_config.fingerprint),
    ):
        ours = getattr(drafter_config, name, theirs)
        is_unnamed = name == "target_fingerprint" and not (ours and theirs)
        if ours != theirs and not is_unnamed:
            raise ValueError(
                "`drafter` was made for another target: its "
                f"{name.removeprefix('target_')} is {ours}, the target's is {theirs}"
            )
    for tap in drafter_config.tap_layers:
        if not -1 <= tap < target_config.num_layers:
            raise ValueError(
                f"`drafter` taps layer {tap}, but the target's layers are -1.."
                f"{target_config.num_layers - 1}"
            )


def as_array(name: str, value: Any) -> jax.Array:
    """`value` as an array; raises TypeError if it is none (ragged lists, say)."""
    return _converted(name, value, jnp.asarray)


def check_int(name: str, value: Any, low: int) -> int:
    """`value` as an int; raises unless it is one (static, no bool), at least `low`."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"`{name}` must be an int, got {_shortened(value)}")
    if value < low:
        raise ValueError(f"`{name}` must be at least {low}, got {value}")
    if value > INT32_MAX:
        raise ValueError(f"`{name}` must be at most {INT32_MAX}, got {value}")
    return int(value)  # a numpy integer would wrap around where it is added to


def check_integer(name: str, array: Any) -> None:
    """Raises TypeError unless `array` holds integers."""
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"`{name}` must hold integers, got {array.dtype}")


def is_numeric(dtype: Any) -> bool:
    """Whether a dtype is of real numbers: integers or floats, bfloat16 among them."""
    return any(jnp.issubdtype(dtype, kind) for kind in (jnp.integer, jnp.floating))


def request_keys(key: Any, batch: int) -> jax.Array:
    """Returns typed keys [B]: `key` itself, or `fold_in(key, row)` of a scalar key.

    Keys of another generator than Threefry become Threefry keys made of their words: a
    `vmap` over "rbg" keys draws from the first one only, so that a row's noise would
    depend on its neighbours.

    Raises:
      TypeError: a raw uint32 key (make one with `jax.random.key`).
      ValueError: keys of another batch size.
    """
    if not hasattr(key, "dtype") or not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        raise TypeError(
            "`key` must be a typed key or typed keys [B] (jax.random.key), got "
            f"{getattr(key, 'dtype', type(key).__name__)}"
        )
    if key.ndim == 0:
        rows = jnp.arange(batch, dtype=jnp.uint32)
        keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, rows)
    else:
        check_shape("key", key, "B", (batch,))
        keys = key
    return _as_threefry(keys)


def known(name: str, value: Any) -> np.ndarray | None:
    """The value as a numpy array, or None under a trace, where it is unknown.

    Also right inside `jit` for arrays that the traced function closes over.

    Raises:
      TypeError: no array (ragged lists, say).
    """
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(value)):
        return None
    return _converted(name, value, np.asarray)


def check_range(name: str, value: Any, low: int, high: int, rule: str) -> None:
    """Raises ValueError if a known integer of `value` lies outside low..high.

    Under a trace values are unknown and nothing is checked.
    """
    array = known(name, value)
    if array is None or array.size == 0:
        return
    smallest, largest = int(array.min()), int(array.max())
    if smallest < low or largest > high:
        worst = smallest if smallest < low else largest
        raise ValueError(f"`{name}` must lie in {rule}, got {worst}")


def _as_threefry(keys: jax.Array) -> jax.Array:
    if str(jax.random.key_impl(keys)) == KEY_IMPLEMENTATION:
        return keys
    words = jax.random.key_data(keys)  # [B, n]
    mixed = jax.random.wrap_key_data(
        jnp.zeros((words.shape[0], 2), jnp.uint32), impl=KEY_IMPLEMENTATION
    )
    for column in range(words.shape[1]):
        mixed = jax.vmap(jax.random.fold_in)(mixed, words[:, column])
    return mixed


def _converted(name: str, value: Any, convert: Callable[[Any], Any]) -> Any:
    try:
        return convert(value)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"`{name}` must be an array or nested lists of equal length, got "
            f"{_shortened(value)}"
        ) from error


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
