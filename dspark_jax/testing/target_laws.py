"""The laws that make a model a Target, as one check.

`check_target` feeds random tokens through a target in ways that must not matter (one
row or many, padding between the rows, other requests beside, a rejected draft before)
and compares. A target that passes can be decoded speculatively without changing its
words.
"""

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax import checks
from dspark_jax.testing import contract
from dspark_jax.testing.probe import Probe, TargetLawError, as_numpy
from dspark_jax.types import PyTree, Target


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
    contract.check_static(target)
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
    probe = Probe(target, params, batch, width, atol)
    # An accelerator's default for float32 products is coarser than `atol`.
    with jax.default_matmul_precision("highest"):
        contract.check_shapes(probe, tokens[0])
        whole = _check_finite(probe, tokens[0])
        _check_causality(probe, tokens, whole)
        _check_single_rows(probe, tokens[0], whole)
        _check_context(probe, tokens, whole)
        _check_padding(probe, tokens, whole)
        _check_rollback(probe, tokens)
        _check_other_requests(probe, tokens, whole)
        _check_taps(probe, tokens[0])


def _check_finite(probe: Probe, tokens: np.ndarray) -> np.ndarray:
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


def _check_causality(probe: Probe, tokens: np.ndarray, whole: np.ndarray) -> None:
    width = probe.width
    changed = tokens[0, :, :width].copy()
    changed[:, -1] = tokens[1, :, width - 1]
    got, _, _ = probe.feed(changed, range(width), probe.fresh(), None)
    law = "a row sees positions up to its own only"
    probe.same(law, got[:, :-1], whole[:, : width - 1])


def _check_single_rows(probe: Probe, tokens: np.ndarray, whole: np.ndarray) -> None:
    single, _ = probe.singles(tokens, probe.fresh())
    probe.same("W rows equal W single rows", whole, single)


def _check_context(probe: Probe, tokens: np.ndarray, whole: np.ndarray) -> None:
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


def _check_padding(probe: Probe, tokens: np.ndarray, whole: np.ndarray) -> None:
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


def _check_rollback(probe: Probe, tokens: np.ndarray) -> None:
    width, start = probe.width, probe.width // 2
    _, _, cache = probe.feed(tokens[0, :, :width], range(width), probe.fresh(), None)
    _, _, cache = probe.feed(tokens[0, :, width:], range(width, 2 * width), cache, None)
    again = tokens[1, :, start : start + width]
    got, _, _ = probe.feed(again, range(start, start + width), cache, None)
    _, fresh = probe.singles(tokens[0, :, :start], probe.fresh())
    want, _, _ = probe.feed(again, range(start, start + width), fresh, None)
    law = "feeding again from an earlier position equals a fresh cache (rollback)"
    probe.same(law, got, want)


def _check_other_requests(probe: Probe, tokens: np.ndarray, whole: np.ndarray) -> None:
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


def _check_taps(probe: Probe, tokens: np.ndarray) -> None:
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
    embedded = as_numpy(probe.target.embed(probe.params, jnp.asarray(rows)))
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
