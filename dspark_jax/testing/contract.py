"""What a Target is before anything is computed: static, and of the right shapes."""

import copy
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax import kv_cache
from dspark_jax.testing.probe import Probe, TargetLawError
from dspark_jax.types import Bound, PyTree, Target

CONFIG_FIELDS = (
    "vocab_size",
    "width",
    "num_layers",
    "max_position",
    "stop_tokens",
    "fingerprint",
)


def check_static(target: Target) -> None:
    """Raises unless `target` is hashable and equal by value, with all its fields."""
    if not isinstance(target, Target):
        raise TypeError(f"`target` must be a Target, got {type(target).__name__}")
    for name in CONFIG_FIELDS:
        if not hasattr(target.config, name):
            raise TargetLawError(f"config has {', '.join(CONFIG_FIELDS)}: no {name}")
    law = "hashable and equal by value"
    try:
        hash(target)
    except TypeError as error:
        raise TargetLawError(f"{law}: {error}") from error
    for name in ("init_cache", "forward", "unembed", "embed"):
        function = getattr(target, name)
        while isinstance(function, Bound):
            function = function.function
        # What `def` or `lambda` makes inside another function is new at every call.
        where = getattr(function, "__qualname__", "")
        if "<locals>" in where or "<lambda>" in where:
            raise TargetLawError(
                f"{law}: {name} is {where}, made anew with every Target; use a "
                "module-level function, and dspark_jax.Bound for its arguments"
            )
    for name, part in target._asdict().items():
        if copy.deepcopy(part) != part:
            raise TargetLawError(f"{law}: a copy of {name} is not equal to it")


def check_shapes(probe: Probe, tokens: np.ndarray) -> None:
    """Raises unless shapes and dtypes are those of `Target`; computes nothing."""
    target, (batch, width) = probe.target, (probe.batch, probe.width)
    size, vocab = target.config.width, target.config.vocab_size
    rows = jnp.asarray(tokens[:, :width])
    positions = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), rows.shape)

    def everything(params: PyTree, rows: jax.Array, positions: jax.Array) -> Any:
        cache = probe.fresh()
        hidden, taps, after = target.forward(
            params, rows, positions, cache, tap_layers=probe.layers
        )
        plain = target.forward(params, rows, positions, cache, tap_layers=())
        return {
            "hidden": hidden,
            "taps": taps,
            "cache": (cache, after, plain[2]),
            "untapped": plain[1],
            "logits": target.unembed(params, hidden),
            "logits of one row": target.unembed(params, hidden[:, 0]),
            "embed": target.embed(params, rows),
        }

    found = jax.eval_shape(everything, probe.params, rows, positions)
    num_taps = len(probe.layers)
    for name, shape in (
        ("hidden", (batch, width, size)),
        ("taps", (batch, width, num_taps * size)),
        ("logits", (batch, width, vocab)),
        ("logits of one row", (batch, vocab)),
        ("embed", (batch, width, size)),
    ):
        if getattr(found[name], "shape", None) != shape:
            got = getattr(found[name], "shape", found[name])
            raise TargetLawError(f"{name} has shape {shape}: got {got}")
    if found["untapped"] is not None:
        raise TargetLawError("taps are None when tap_layers is (): got an array")
    if found["logits"].dtype != jnp.float32:
        raise TargetLawError(f"logits are float32: got {found['logits'].dtype}")
    before, *others = (
        jax.tree.map(lambda x: (x.shape, x.dtype), cache) for cache in found["cache"]
    )
    if any(after != before for after in others):
        raise TargetLawError(
            f"forward returns a cache of the shapes it got: {before} became {others[0]}"
        )
    try:  # Several samples of one prompt repeat the requests' rows.
        jax.eval_shape(
            lambda: kv_cache.repeat_rows(
                probe.fresh(), lambda n: target.init_cache(n, probe.capacity), batch, 2
            )
        )
    except ValueError as error:
        raise TargetLawError(f"a cache has one axis of requests: {error}") from error
    probe.hidden_dtype = found["hidden"].dtype
