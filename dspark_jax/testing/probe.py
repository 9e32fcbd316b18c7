"""A target under test: its passes, jitted once, and comparisons that name the law."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.types import PyTree, Target


class TargetLawError(AssertionError, ValueError):
    """A target breaks a law; the message says which, where and by how much."""


class Probe:
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
        return as_numpy(hidden), None if tapped is None else as_numpy(tapped), cache

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


def as_numpy(array: jax.Array) -> np.ndarray:
    """The array on the host, float32."""
    return np.asarray(array.astype(jnp.float32))
