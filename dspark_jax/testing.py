"""Checks of your own models: the laws of a `Target`, and tiny models to test with.

`check_target` feeds random tokens through a target in ways that must not matter (one
row or many, padding between the rows, other requests beside, a rejected draft before)
and compares. A target that passes can be decoded speculatively without changing its
words.
"""

import copy
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax import checks, kv_cache
from dspark_jax.config import BlockConfig, DecoderConfig, DrafterConfig
from dspark_jax.drafters import dspark
from dspark_jax.targets import decoder
from dspark_jax.types import Bound, Drafter, PyTree, Target

CONFIG_FIELDS = (
    "vocab_size",
    "width",
    "num_layers",
    "max_position",
    "stop_tokens",
    "fingerprint",
)


class TargetLawError(AssertionError, ValueError):
    """A target breaks a law; the message says which, where and by how much."""


class TinyModels(NamedTuple):
    """A random target and a random drafter for it."""

    target: Target
    target_params: PyTree
    drafter: Drafter
    drafter_params: PyTree


def check_target(
    target: Target,
    params: PyTree,
    *,
    key: jax.Array | None = None,
    batch: int = 3,
    width: int = 4,
    atol: float | None = None,
) -> None:
    """Raises TargetLawError (an AssertionError) unless `target` keeps the laws.

    The laws, in the order they are checked: it is hashable and equal by value; shapes
    and dtypes are those of `Target`; everything is finite; a row sees positions up to
    its own only; W rows equal W single rows; a row sees all earlier positions; a row at
    position -1 writes nothing and influences nothing; feeding again from an earlier
    position equals a fresh cache; other requests are invisible; taps are the raw
    outputs of layers.

    Compiles three small programs. Random parameters will do, if they are not so small
    that logits hardly depend on the context.

    Args:
      target: see `dspark_jax.Target`; needs max_position >= 2 * width.
      params: its parameters.
      key: makes the tokens; None takes a fixed one.
      batch: requests, >= 2.
      width: rows W of the window, >= 4.
      atol: the largest difference allowed between equal rows, relative to the largest
        magnitude among them (or 1); None takes 1e-4, or 0.1 for 16-bit targets.

    Raises:
      TargetLawError: a law is broken.
    """
    checks.check_int("batch", batch, 2)
    checks.check_int("width", width, 4)
    _check_static(target)
    if target.config.max_position < 2 * width:
        raise ValueError(
            f"`target.config.max_position` must be at least 2 * width = {2 * width}, "
            f"got {target.config.max_position}"
        )
    key = jax.random.key(0) if key is None else key
    shape = (3, batch, 2 * width)
    vocab_size = target.config.vocab_size
    tokens = np.array(jax.random.randint(key, shape, 0, vocab_size, jnp.int32))
    # Neighbours and alternatives must differ for a difference to be seen.
    tokens[1:] = (tokens[:1] + np.array([1, 2])[:, None, None]) % vocab_size
    probe = _Probe(target, params, batch, width, atol)
    # An accelerator's default for float32 is coarser than `atol`.
    with jax.default_matmul_precision("highest"):
        _check_shapes(probe, tokens[0])
        whole = _check_finite(probe, tokens[0])
        _check_causality(probe, tokens, whole)
        _check_single_rows(probe, tokens[0], whole)
        _check_context(probe, tokens, whole)
        _check_padding(probe, tokens, whole)
        _check_rollback(probe, tokens)
        _check_other_requests(probe, tokens, whole)
        _check_taps(probe, tokens[0])


def make_tiny_models(
    key: jax.Array | None = None,
    *,
    vocab_size: int = 19,
    block_size: int = 3,
    scale: float = 0.4,
    target_fields: dict[str, Any] | None = None,
    drafter_fields: dict[str, Any] | None = None,
) -> TinyModels:
    """A random target of two layers and a random drafter for it, for quick tests.

    >>> models = make_tiny_models(block_size=4)
    >>> models.drafter.config.block_size
    4

    Args:
      key: makes the parameters; None takes a fixed one.
      vocab_size: V.
      block_size: the largest draft length.
      scale: standard deviation of matrices and biases; small ones make words nearly
        uniform.
      target_fields, drafter_fields: fields of the configurations to change.
    """
    block = BlockConfig(
        width=8, num_heads=2, num_kv_heads=1, head_width=4, ffn_width=12
    )
    config = DecoderConfig(
        **{
            "vocab_size": vocab_size,
            "num_layers": 2,
            "block": block,
            "max_position": 64,
            **(target_fields or {}),
        }
    )
    drafter_config = DrafterConfig(
        **{
            "vocab_size": config.vocab_size,
            "num_layers": 1,
            "block": dataclasses.replace(block, width=config.width),
            "max_position": config.max_position,
            "block_size": block_size,
            "mask_token": 1,
            "tap_layers": (0, config.num_layers - 1) if config.num_layers > 1 else (0,),
            "num_target_layers": config.num_layers,
            "markov_rank": 4,
            **(drafter_fields or {}),
        }
    )
    target = decoder.make_target(config)

    words = np.asarray(jax.random.key_data(jax.random.key(0) if key is None else key))
    random = np.random.default_rng(words)

    def draw(path: Any, leaf: Any) -> jax.Array:
        values = random.normal(size=leaf.shape)
        name = str(getattr(path[-1], "name", path[-1]))
        values = 1 + 0.1 * values if name.endswith("norm") else scale * values
        return jnp.asarray(values, leaf.dtype)

    init = functools.partial(jax.tree_util.tree_map_with_path, draw)
    return TinyModels(
        target=target,
        target_params=init(decoder.abstract(config)),
        drafter=dspark.make_drafter(drafter_config, target),
        drafter_params=init(dspark.abstract(drafter_config)),
    )


class _Probe:
    """A target under test: its jitted passes, always of the same few shapes."""

    def __init__(
        self, target: Target, params: PyTree, batch: int, width: int, atol: float | None
    ):
        self.target, self.params, self.atol = target, params, atol
        self.batch, self.width, self.capacity = batch, width, 2 * width
        self.layers = tuple(range(-1, target.config.num_layers))
        self._forward = jax.jit(target.forward, static_argnames="tap_layers")

    def fresh(self) -> PyTree:
        return self.target.init_cache(self.batch, self.capacity)

    def feed(
        self, tokens: Any, positions: Any, cache: PyTree, taps: tuple[int, ...] | None
    ) -> tuple[np.ndarray, np.ndarray | None, PyTree]:
        """One pass; `taps` None taps every layer. Positions [W] or [B, W]."""
        taps = self.layers if taps is None else taps
        tokens = jnp.asarray(tokens, jnp.int32)
        positions = jnp.broadcast_to(jnp.asarray(positions, jnp.int32), tokens.shape)
        hidden, tapped, cache = self._forward(
            self.params, tokens, positions, cache, tap_layers=taps
        )
        return _numpy(hidden), None if tapped is None else _numpy(tapped), cache

    def singles(
        self, tokens: np.ndarray, cache: PyTree, first: int = 0
    ) -> tuple[np.ndarray, PyTree]:
        """Feeds tokens [B, n] one row at a time, untapped."""
        rows = []
        for index in range(tokens.shape[1]):
            hidden, _, cache = self.feed(
                tokens[:, index : index + 1], [first + index], cache, ()
            )
            rows.append(hidden)
        return np.concatenate(rows, axis=1), cache

    def same(self, law: str, got: np.ndarray, want: np.ndarray) -> None:
        """Raises unless got [B, W, ...] equals want; NaN never does."""
        limit = self.tolerance(want)
        difference = np.abs(got - want)
        if np.all(difference <= limit):
            return
        worst = np.argmax(np.where(np.isnan(difference), np.inf, difference))
        place = np.unravel_index(worst, got.shape)
        raise TargetLawError(
            f"{law}: at (request, row, channel) = {tuple(int(i) for i in place)} got "
            f"{got[place]:.6g}, expected {want[place]:.6g}; the difference "
            f"{difference[place]:.3g} exceeds {limit:.3g}"
        )

    def tolerance(self, want: np.ndarray) -> float:
        atol = 1e-4 if self.atol is None else self.atol
        if self.atol is None and self.hidden_dtype.itemsize < 4:
            atol = 0.1
        return atol * max(1.0, float(np.max(np.abs(want))))

    hidden_dtype = np.dtype("float32")  # set by `_check_shapes`


def _check_static(target: Target) -> None:
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


def _check_shapes(probe: _Probe, tokens: np.ndarray) -> None:
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


def _check_finite(probe: _Probe, tokens: np.ndarray) -> np.ndarray:
    """Returns the hidden states [B, 2W, D] of a plain pass, W rows at a time."""
    width = probe.width
    first, taps, cache = probe.feed(
        tokens[:, :width], range(width), probe.fresh(), None
    )
    second, _, _ = probe.feed(tokens[:, width:], range(width, 2 * width), cache, None)
    whole = np.concatenate([first, second], axis=1)
    assert taps is not None
    for name, array in (("hidden", whole), ("taps", taps)):
        if not np.all(np.isfinite(array)):
            place = np.argwhere(~np.isfinite(array))[0]
            raise TargetLawError(
                f"{name} are finite: at (request, row, channel) = "
                f"{tuple(int(i) for i in place)} got {array[tuple(place)]}"
            )
    return whole


def _check_causality(probe: _Probe, tokens: np.ndarray, whole: np.ndarray) -> None:
    width = probe.width
    changed = tokens[0, :, :width].copy()
    changed[:, -1] = tokens[1, :, width - 1]
    got, _, _ = probe.feed(changed, range(width), probe.fresh(), None)
    law = "a row sees positions up to its own only"
    probe.same(law, got[:, :-1], whole[:, : width - 1])


def _check_single_rows(probe: _Probe, tokens: np.ndarray, whole: np.ndarray) -> None:
    single, _ = probe.singles(tokens, probe.fresh())
    probe.same("W rows equal W single rows", whole, single)


def _check_context(probe: _Probe, tokens: np.ndarray, whole: np.ndarray) -> None:
    width = probe.width
    changed = tokens[0, :, :width].copy()
    changed[:, 0] = tokens[1, :, 0]
    first, _, cache = probe.feed(changed, range(width), probe.fresh(), None)
    second, _, _ = probe.feed(
        tokens[0, :, width:], range(width, 2 * width), cache, None
    )
    for name, row, seen in (
        ("in its window", width - 1, first[:, -1]),
        ("in the cache", width, second[:, 0]),
    ):
        if np.array_equal(seen, whole[:, row]):
            raise TargetLawError(
                f"a row sees all earlier positions: another token at position 0 {name} "
                f"changed nothing at position {row}"
            )


def _check_padding(probe: _Probe, tokens: np.ndarray, whole: np.ndarray) -> None:
    law = "a row at position -1 writes nothing and influences nothing"
    width = probe.width
    cache, done = probe.fresh(), 0
    # Padding after, between and before: 0 and 1, then W rows, and at the last position
    # of the cache, where -1 would land if it were an index.
    while done < 2 * width:
        left = 2 * width - done
        if done == 0:
            real = [0, width - 2]
        elif left > width:
            real = list(range(width))[: left - 1]
        else:
            real = [1] if left == 1 else list(range(1, min(width, left)))
        rows = tokens[2, :, :width].copy()  # other tokens where there is padding
        positions = np.full((width,), -1, np.int32)
        for slot, at in enumerate(real):
            rows[:, at] = tokens[0, :, done + slot]
            positions[at] = done + slot
        got, _, cache = probe.feed(rows, positions, cache, None)
        probe.same(law, got[:, real], whole[:, done : done + len(real)])
        done += len(real)


def _check_rollback(probe: _Probe, tokens: np.ndarray) -> None:
    width, start = probe.width, probe.width // 2
    _, _, cache = probe.feed(tokens[0, :, :width], range(width), probe.fresh(), None)
    _, _, cache = probe.feed(tokens[0, :, width:], range(width, 2 * width), cache, None)
    again = tokens[1, :, start : start + width]
    got, _, _ = probe.feed(again, range(start, start + width), cache, None)
    _, fresh = probe.singles(tokens[0, :, :start], probe.fresh())
    want, _, _ = probe.feed(again, range(start, start + width), fresh, None)
    law = "feeding again from an earlier position equals a fresh cache (rollback)"
    probe.same(law, got, want)


def _check_other_requests(probe: _Probe, tokens: np.ndarray, whole: np.ndarray) -> None:
    law = "other requests are invisible"
    width = probe.width
    rows = tokens[1, :, :width].copy()
    rows[0] = tokens[0, 0, :width]
    positions = np.tile(np.arange(width, dtype=np.int32), (probe.batch, 1))
    got, _, cache = probe.feed(rows, positions, probe.fresh(), None)
    probe.same(law, got[:1], whole[:1, :width])
    positions[1:] = -1  # finished requests
    positions[0] += width
    rows[0] = tokens[0, 0, width:]
    got, _, cache = probe.feed(rows, positions, cache, None)
    probe.same(law, got[:1], whole[:1, width:])


def _check_taps(probe: _Probe, tokens: np.ndarray) -> None:
    width, size = probe.width, probe.target.config.width
    rows = tokens[:, :width]
    hidden, taps, _ = probe.feed(rows, range(width), probe.fresh(), None)
    assert taps is not None
    parts = dict(
        zip(
            probe.layers,
            np.split(taps, len(probe.layers), axis=-1),
            strict=True,
        )
    )
    embedded = _numpy(probe.target.embed(probe.params, jnp.asarray(rows)))
    probe.same("tap -1 equals embed(tokens)", parts[-1], embedded)
    last = probe.layers[-1]
    for layer in probe.layers[1:]:
        if np.array_equal(parts[layer], parts[layer - 1]):
            raise TargetLawError(
                f"tap i is the raw output of layer i: taps {layer - 1} and {layer} are "
                "the same, as when the list of layers is off by one"
            )
    if np.array_equal(parts[last], hidden):
        raise TargetLawError(
            f"tap i is the raw output of layer i: tap {last} equals `hidden`, which "
            "comes after the final norm"
        )
    some = (-1, last)
    again, few, _ = probe.feed(rows, range(width), probe.fresh(), some)
    assert few is not None
    if few.shape[-1] != len(some) * size:
        raise TargetLawError(
            f"taps of {some} have width {len(some) * size}: got {few.shape[-1]}"
        )
    law = "taps are concatenated in the order of tap_layers"
    probe.same(law, few, np.concatenate([parts[layer] for layer in some], axis=-1))
    probe.same("tap_layers do not change hidden", again, hidden)


def _numpy(array: jax.Array) -> np.ndarray:
    return np.asarray(array.astype(jnp.float32))
