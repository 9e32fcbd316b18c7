"""Checks of what enters the engine: models, and each request's arguments."""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax import checks, kv_cache, paged_cache
from dspark_jax.decoding import arguments
from dspark_jax.sampling import Sampling, check_sampling
from dspark_jax.serving.control import to_bits
from dspark_jax.serving.engine_config import SAMPLING_FIELDS, EngineConfig
from dspark_jax.types import Drafter, PyTree, Target

_ABSENT = {"temperature": 0.0, "top_p": 1.0, "min_p": 0.0}


def check_models(
    target: Target,
    target_params: PyTree,
    drafter: Drafter | None,
    drafter_params: PyTree,
    config: EngineConfig,
) -> None:
    """Raises unless these models can be served in this mode.

    The target's forward pass is traced (not run) over packed rows.
    """
    if not isinstance(config, EngineConfig):
        raise TypeError(
            f"`config` must be an EngineConfig, got {type(config).__name__}"
        )
    if not isinstance(target, Target):
        raise TypeError(f"`target` must be a Target, got {type(target).__name__}")
    if config.max_length > target.config.max_position + 1:
        raise ValueError(
            "`config.max_length` must be at most the target's max_position + 1 = "
            f"{target.config.max_position + 1}, got {config.max_length}"
        )
    _check_pages("target", jax.eval_shape(lambda: target.init_cache(1, 8)))
    _check_packed_rows(target, target_params, config.page_size)
    if config.mode == "plain":
        return
    if not isinstance(drafter, Drafter):
        raise TypeError(
            f"mode {config.mode!r} needs a `drafter`, a Drafter, got "
            f"{type(drafter).__name__}"
        )
    if drafter_params is None and drafter.config.tap_layers:
        raise TypeError("`drafter_params` must be the drafter's parameters, got None")
    _check_pages("drafter", jax.eval_shape(lambda: drafter.init_state(1, 8)))
    if config.is_metered:
        arguments.check_confidence(f"mode {config.mode!r}", drafter)


def _check_pages(name: str, cache: Any) -> None:
    if not isinstance(cache, kv_cache.DenseCache):
        is_array = isinstance(cache, jax.ShapeDtypeStruct)
        kind = "an array" if is_array else f"a {type(cache).__name__}"
        raise TypeError(
            f"`{name}` cannot be served: what it keeps of past tokens is {kind}, and "
            "the engine can page a DenseCache only"
        )


def _check_packed_rows(target: Target, params: PyTree, page_size: int) -> None:
    """Traces a forward pass of packed rows over a paged view."""

    def forward(params: PyTree) -> Any:
        like = jax.eval_shape(lambda: target.init_cache(1, 8))
        pool = paged_cache.PagePool.create(like, 2, page_size)
        counts = jnp.ones((2,), jnp.int32)
        view = pool.view(jnp.zeros((2, 1), jnp.int32))
        view = view.replace(layout=paged_cache.make_layout(counts, 3, 2))
        rows = jnp.zeros((1, 3), jnp.int32)
        return target.forward(params, rows, rows, view)[2]

    try:
        cache = jax.eval_shape(forward, params)
    except (TypeError, ValueError, AttributeError) as error:
        raise TypeError(
            "`target` cannot be served: its forward pass does not run on packed rows "
            f"through `cache.attend` ({error})"
        ) from error
    if not isinstance(cache, paged_cache.PagedCache):
        raise TypeError(
            "`target` cannot be served: its forward pass turned the paged cache into a "
            f"{type(cache).__name__}"
        )


def check_request(
    tokens: Any,
    *,
    max_new_tokens: int,
    sampling: Sampling,
    seed: int | jax.Array,
    stop_tokens: Sequence[int] | None,
    on_tokens: Callable[[list[int]], None] | None,
    target: Target,
    config: EngineConfig,
) -> dict[str, Any]:
    """The checked arguments of a `RequestHandle`.

    Raises:
      TypeError, ValueError: an argument breaks a rule.
    """
    if on_tokens is not None and not callable(on_tokens):
        raise TypeError(
            f"`on_tokens` must be a function or None, got {type(on_tokens).__name__}"
        )
    prompt = _token_list("tokens", tokens, target.config.vocab_size)
    if not prompt:
        raise ValueError("`tokens` must hold at least one token, got none")
    max_new_tokens = checks.check_int("max_new_tokens", max_new_tokens, 1)
    max_position = target.config.max_position
    if len(prompt) > max_position:
        raise ValueError(
            f"`tokens` must not be longer than the target's max_position {max_position}"
            f", got {len(prompt)}"
        )
    asked = len(prompt) + max_new_tokens
    limit = min(asked, max_position + 1)
    if limit > config.max_length:
        raise ValueError(
            f"`tokens` and `max_new_tokens` make {asked} tokens, but the engine's "
            f"max_length is {config.max_length}"
        )
    needed = -(-limit // config.page_size)
    if needed > config.total_pages:
        raise ValueError(
            f"`tokens` and `max_new_tokens` need {needed} pages of {config.page_size}, "
            f"but the engine has {config.total_pages}"
        )
    if stop_tokens is None:
        stop_tokens = target.config.stop_tokens
    stops = _token_list("stop_tokens", stop_tokens, target.config.vocab_size)
    if len(stops) > config.max_stop_tokens:
        raise ValueError(
            f"`stop_tokens` must be at most max_stop_tokens = {config.max_stop_tokens},"
            f" got {len(stops)}"
        )
    padding = [-1] * (config.max_stop_tokens - len(stops))
    return {
        "prompt": prompt,
        "limit": limit,
        "key": _key_words(seed),
        "settings": _settings(sampling, target, config),
        "stop_tokens": stops + padding,
        "on_tokens": on_tokens,
    }


def touch(config: EngineConfig, target: Target) -> None:
    """Runs the small programs that checking a request needs, once."""
    fields: dict[str, Any] = dict.fromkeys(config.sampling_fields, 1.0)
    if "top_k" in fields:
        fields["top_k"] = 1
    check_request(
        [0],
        max_new_tokens=1,
        sampling=Sampling(**fields),
        seed=0,
        stop_tokens=(),
        on_tokens=None,
        target=target,
        config=config,
    )


def _token_list(name: str, tokens: Any, vocab_size: int) -> list[int]:
    array = checks.known(name, tokens)
    if array is None:
        raise TypeError(f"`{name}` must be a list of token ids, got a traced array")
    if array.size == 0:
        return []
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise TypeError(
            f"`{name}` must be a list of token ids, got {array.dtype} of shape "
            f"{array.shape}"
        )
    last = vocab_size - 1
    checks.check_range(name, array, 0, last, f"0..{last} (the vocabulary)")
    return array.tolist()


def _key_words(seed: Any) -> np.ndarray:
    """The words of a request's key, int32 [2] (their bits)."""
    is_small = isinstance(seed, int) and 0 <= seed < 2**31
    implementation = jax.config.values["jax_default_prng_impl"]
    if is_small and implementation == checks.KEY_IMPLEMENTATION:
        return np.array([0, seed], np.int32)  # those of `jax.random.key(seed)`
    if hasattr(seed, "dtype") and jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
        key = seed
        if key.size != 1:
            raise ValueError(
                f"`seed` must be an int or one typed key, got keys of shape {key.shape}"
            )
    else:
        try:
            key = jax.random.key(operator.index(seed))
        except (TypeError, OverflowError) as error:
            raise TypeError(
                f"`seed` must be an int or a typed key (jax.random.key), got {seed!r}"
            ) from error
    keys = checks.request_keys(jnp.reshape(key, (-1,)), 1)
    return np.asarray(jax.random.key_data(keys))[0].view(np.int32)


def _settings(
    sampling: Sampling, target: Target, config: EngineConfig
) -> dict[str, int]:
    """The fields of a request's Sampling as int32 (floats as bits)."""
    if not isinstance(sampling, Sampling):
        raise TypeError(f"`sampling` must be a Sampling, got {type(sampling).__name__}")
    names = config.sampling_fields
    values = tuple(getattr(sampling, name) for name in SAMPLING_FIELDS)
    if all(value is None or isinstance(value, int | float) for value in values):
        return _cached_settings(target.config.vocab_size, names, *values)
    return _checked_settings(sampling, target.config.vocab_size, names)


@functools.lru_cache(maxsize=1024, typed=True)  # 2 is a top_k, and 2.0 is none
def _cached_settings(
    vocab_size: int, names: tuple[str, ...], *values: Any
) -> dict[str, int]:
    sampling = Sampling(**dict(zip(SAMPLING_FIELDS, values, strict=True)))
    return _checked_settings(sampling, vocab_size, names)


def _checked_settings(
    sampling: Sampling, vocab_size: int, names: tuple[str, ...]
) -> dict[str, int]:
    checked = check_sampling(sampling, 1)
    settings: dict[str, int] = {}
    for name in SAMPLING_FIELDS:
        value = getattr(checked, name)
        if name in names:
            if value is None:
                value = _ABSENT.get(name, vocab_size)
            else:
                value = np.asarray(value)[0]
            settings[name] = int(value) if name == "top_k" else to_bits(value)
        elif value is not None and np.asarray(value)[0] != _ABSENT.get(name):
            raise ValueError(
                f"`sampling.{name}` must be declared in EngineConfig.sampling_fields, "
                f"which has {names}"
            )
    return settings
