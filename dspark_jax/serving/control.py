"""One int32 array a step, each way: a transfer costs more than what it carries.

Both sides name columns; floats travel as their bits.
"""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Columns:
    """Names and widths of the columns of an int32 array [rows, sum of widths]."""

    widths: tuple[tuple[str, int], ...]

    @property
    def width(self) -> int:
        return sum(width for _, width in self.widths)

    def at(self, name: str) -> slice:
        """Where the columns of `name` are."""
        return self._places[name]

    @functools.cached_property
    def _places(self) -> dict[str, slice]:
        ends = itertools.accumulate(width for _, width in self.widths)
        return {
            name: slice(end - width, end)
            for (name, width), end in zip(self.widths, ends, strict=True)
        }

    def of(self, array: Any, name: str) -> Any:
        """The columns of `name` [rows, width], of a numpy or a JAX array."""
        return array[..., self.at(name)]

    def one(self, array: Any, name: str) -> Any:
        """A column of width 1, [rows]."""
        return array[..., self.at(name).start]

    def join(self, **parts: jax.Array) -> jax.Array:
        """The array made of its columns: [..] or [.., width], int32 or float32."""
        columns = []
        for name, _ in self.widths:
            part = parts[name]
            if part.dtype == jnp.float32:
                part = jax.lax.bitcast_convert_type(part, jnp.int32)
            columns.append(part)
        rank = max(part.ndim for part in columns)
        columns = [p if p.ndim == rank else p[..., None] for p in columns]
        return jnp.concatenate(columns, axis=-1)


def to_bits(value: float) -> int:
    """The bits of a float32 as an int32."""
    return int(np.float32(value).view(np.int32))


def from_bits(array: np.ndarray) -> np.ndarray:
    """float32 of the bits in a numpy int32 array."""
    return np.ascontiguousarray(array).view(np.float32)


def traced_from_bits(array: jax.Array) -> jax.Array:
    """float32 of the bits in a JAX int32 array."""
    return jax.lax.bitcast_convert_type(array, jnp.float32)
