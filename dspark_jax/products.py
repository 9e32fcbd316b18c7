"""Rows times a matrix stored [out, in], in the form that each backend runs fastest.

One row is bound by memory, and the few rows of a verify window should cost little more.
On a CPU that depends on how XLA reads the weights: in place, as the left operand, with
the smaller right one kept apart by optimisation barriers (otherwise it packs them at
every call). Its kernel then walks down several rows of weights at once, while the
processor prefetches one stream a page: rows shorter than a page come slowly. Here n of
them are joined into one of at least a page, against a block-diagonal right operand. The
zeros cost nothing while its columns fit the vector register that the kernel fills
anyway, and the sums keep their order.

Measured on two cores of a Xeon (float32, jax 0.10.2), one matrix of 545 MB with rows of
576: 8 rows 36 -> 28 ms, one row 19 ms. For SmolLM2-135M: a verify pass of 8 rows takes
1.37 times as long as one row, before 1.48; a speculative round of 7 drafts as long as
1.7 plain steps, before 1.9.

On a GPU fewer than 8 rows of 16 bits are padded to 8 before a large matrix: one row
alone takes another path of XLA, which is slower there (a plain step of Qwen3-4B 3.76 ms
without and 3.56 ms with padding on an H200). Small matrices gain from that path: a
plain step of SmolLM2-135M took 0.95 ms without and 1.07 ms with padding (two runs).
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import products

# Columns that a register of XLA:CPU's kernel holds (AVX-512, float32).
_LANES = 16
_PAGE_BYTES = 4096
# Up to here weights in place are worth their barriers on a CPU: 8 rows of a 135M model
# 48 -> 38 ms, a third of the work for 48 rows, no gain at 1,024.
_MOST_IN_PLACE = 512
# On a GPU: rows of a product with a matrix of so many bytes. Measured were models with
# matrices of 20 MB and more, and of 3.5 MB and less.
_FEWEST_ROWS, _PADDED_FROM_BYTES = 8, 2**22


def product(
    x: Float[Array, "... I"], weight: Float[Array, "O I"], dtype: Any
) -> Float[Array, "... O"]:
    """x @ weight.T over the last axis, accumulated and returned in `dtype`."""
    rows = x.reshape(-1, x.shape[-1])  # [T, I]
    out = jax.lax.platform_dependent(
        rows,
        weight,
        cpu=functools.partial(_product_on_cpu, dtype=dtype),
        cuda=functools.partial(_product_on_gpu, dtype=dtype),
        default=functools.partial(_product_of_rows, dtype=dtype),
    )
    return out.reshape(*x.shape[:-1], weight.shape[0])


def contract(
    left: jax.Array,
    right: jax.Array,
    left_axes: Sequence[int],
    right_axes: Sequence[int],
    dtype: Any = jnp.float32,
) -> jax.Array:
    """Sums over pairs of axes, accumulated and returned in `dtype`.

    Args:
      left, right: of one dtype; float32 is multiplied as float32.
      left_axes, right_axes: as many of the one as of the other. The axes that are left
        follow one another, left's first.
    """
    return jax.lax.dot_general(
        left,
        right,
        ((left_axes, right_axes), ((), ())),
        precision=products.precision(left.dtype),
        preferred_element_type=dtype,
    )


def _product_of_rows(rows: jax.Array, weight: jax.Array, dtype: Any) -> jax.Array:
    return contract(rows, weight, (1,), (1,), dtype)


def _product_on_gpu(rows: jax.Array, weight: jax.Array, dtype: Any) -> jax.Array:
    count = rows.shape[0]
    is_large = weight.size * weight.dtype.itemsize >= _PADDED_FROM_BYTES
    if count < _FEWEST_ROWS and rows.dtype.itemsize == 2 and is_large:
        rows = jnp.pad(rows, ((0, _FEWEST_ROWS - count), (0, 0)))
    return _product_of_rows(rows, weight, dtype)[:count]


def _product_on_cpu(rows: jax.Array, weight: jax.Array, dtype: Any) -> jax.Array:
    count = rows.shape[0]
    if not 1 < count <= _MOST_IN_PLACE:
        # The weights stand on the left here too: jax 0.12 runs one row of
        # `rows @ weight.T` as a naive loop (92 against 22 ms).
        return _weights_on_the_left(weight, rows.T, dtype).T
    left, right = weight, rows.T
    if 2 * count <= _LANES and rows.dtype == jnp.float32:
        left, right = _joined(weight, rows)
    right = jax.lax.optimization_barrier(right)
    out = jax.lax.optimization_barrier(_weights_on_the_left(left, right, dtype))
    # [O / n, n * W], whose row o holds the weights' rows n * o .. n * o + n - 1.
    return out.reshape(weight.shape[0], -1).T[:count]


def _joined(weight: jax.Array, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Left [O / n, n * I] and right [n * I, n * W] operand, W a power of two.

    Rows are padded, since other counts are slow (7 rows cost more than 8). For 9 to 16
    nothing can be joined, and padding alone costs 6 to 10 %.
    """
    count, width = rows.shape
    padded = 1 << (count - 1).bit_length()
    rows = jnp.pad(rows, ((0, padded - count), (0, 0)))
    num_joined = 1
    while (
        num_joined * width * rows.dtype.itemsize < _PAGE_BYTES
        and 2 * num_joined * padded <= _LANES
        and weight.shape[0] % (2 * num_joined) == 0
    ):
        num_joined *= 2
    diagonal = [
        jnp.pad(rows, ((0, 0), (at * width, (num_joined - 1 - at) * width)))
        for at in range(num_joined)
    ]
    right = jnp.concatenate(diagonal, axis=0).T  # [n * I, n * W]
    return weight.reshape(-1, num_joined * width), right


def _weights_on_the_left(weight: jax.Array, right: jax.Array, dtype: Any) -> jax.Array:
    return contract(weight, right, (1,), (0,), dtype)
