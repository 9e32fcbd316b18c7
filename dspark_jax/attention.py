"""Attention of new rows over a cache: by XLA, or by a kernel of `pallas_kernels`.

`implementation` is a target's static setting. "auto" is XLA, except where a kernel was
measured faster: on one Hopper GPU, or inside `shard_map`, in 16-bit types, for windows
of few rows over much context (`cached_attention.fastest`). Plain and speculative passes
are then attended alike; in float32 nothing but XLA multiplies exactly enough, so "auto"
is XLA. A name is run as it is, or refused with the reason.

The choice is made at trace time, by the default backend: on a CPU nothing is traced
that will not run. A program that is then lowered for another platform than the default
one still gets XLA's form there (`jax.lax.platform_dependent`).
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import cached_attention


class Place(NamedTuple):
    """Where rows stand in a cache; windows [N, W], or packed rows [T]."""

    positions: jax.Array  # int32 [N, W] or [T]: a row sees up to it; -1 = padding
    table: jax.Array | None = None  # int32 [N, M], pages of a window
    layout: Any = None  # a `paged_cache.RowLayout` of packed rows


Plain = Callable[[jax.Array, jax.Array, jax.Array, Place], jax.Array]


def choose(
    implementation: str, query: Any, keys: Any, *, rows: int, table: Any | None
) -> str:
    """The name of what will attend: "xla", or a kernel's.

    Args:
      implementation: "auto", or a name, which is the answer.
      query: [.., H, E]; only shapes and dtypes are read.
      keys: [B, G, C, E], or pages [num_pages, G, P, E].
      rows: of a window at most.
      table: the pages' table, if they are pages.
    """
    if implementation != "auto":
        return implementation
    if query.dtype.itemsize > 2:
        return "xla"
    return cached_attention.fastest(query, keys, rows=rows, page_table=table)


def stored_capacity(
    capacity: int, implementation: str, dtype: Any, spare: int = 0
) -> int:
    """Positions that a dense cache stores where a kernel may attend it.

    Kernels want a multiple of 8, and `spare` ones for a draft block at its end.
    """
    is_plain = implementation == "xla"
    if implementation == "auto":
        is_plain = jax.default_backend() != "gpu" or jnp.dtype(dtype).itemsize > 2
    return capacity if is_plain else -(-(capacity + spare) // 8) * 8


def attend(
    query: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    place: Place,
    *,
    implementation: str,
    plain: Plain,
) -> jax.Array:
    """Attention of rows that see the positions up to their own; padding is finite.

    Args:
      query: windows [N, W, H, E], or packed rows [T, H, E].
      keys, values: a dense cache [N, G, C, E], or pages [num_pages, G, P, E].
      place: where the rows stand.
      implementation: the setting.
      plain: the same by XLA, a module-level function of the other arguments.

    Raises:
      NotImplementedError: the named kernel can't run these arrays.
    """
    rows = query.shape[1]
    if place.layout is not None:
        rows = place.layout.rows.shape[1]
    name = choose(implementation, query, keys, rows=rows, table=place.table)
    if name == "xla":
        return plain(query, keys, values, place)
    return _by_kernel(
        query,
        keys,
        values,
        place,
        name=name,
        plain=plain,
        is_named=implementation == name,
    )


# Jitted: a program traces and lowers the kernel once and not in every layer. Equal
# kernels are also compiled once.
@functools.partial(jax.jit, static_argnames=("name", "plain", "is_named"))
def _by_kernel(
    query: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    place: Place,
    *,
    name: str,
    plain: Plain,
    is_named: bool,
) -> jax.Array:
    max_rows = None if place.layout is None else place.layout.rows.shape[1]

    @jax.custom_vjp
    def kernel(query, keys, values, place):
        request, num_keys = None, place.positions + 1
        if place.layout is not None:
            request = place.layout.request
            # Padding, which the layout counts as of request N.
            request = jnp.where(num_keys > 0, request, jnp.int32(-1))
        call = _batched(name, max_rows)
        return call(query, keys, values, place.table, request, num_keys)

    def forward(query, keys, values, place):
        return kernel(query, keys, values, place), (query, keys, values, place)

    def backward(operands, cotangent):
        *arrays, place = operands
        _, pull = jax.vjp(lambda q, k, v: plain(q, k, v, place), *arrays)
        return (*pull(cotangent), None)

    kernel.defvjp(forward, backward)
    if is_named:
        return kernel(query, keys, values, place)
    return jax.lax.platform_dependent(
        query, keys, values, place, cuda=kernel, default=plain
    )


def _batched(name: str, max_rows: int | None) -> Callable[..., jax.Array]:
    """The kernel, in which a vmapped axis becomes more requests of the same call."""

    @jax.custom_batching.custom_vmap
    def call(query, keys, values, table, request, num_keys):
        return cached_attention.verify_attention(
            query,
            keys,
            values,
            num_keys=num_keys,
            slots=request,
            max_rows=max_rows,
            page_table=table,
            implementation=name,
        )

    @call.def_vmap
    def _(size, is_batched, query, keys, values, table, request, num_keys):
        has_pool = is_batched[1] or is_batched[2]

        def joined(array, is_mapped):
            if not is_mapped:
                array = jnp.broadcast_to(array[None], (size, *array.shape))
            return array.reshape(-1, *array.shape[2:])

        index = jnp.arange(size, dtype=jnp.int32)
        num_slots = keys.shape[1 if is_batched[1] else 0]
        if table is not None:
            num_pages = num_slots
            num_slots = table.shape[1 if is_batched[3] else 0]
            table = joined(table, is_batched[3]).reshape(size, -1, table.shape[-1])
            if has_pool:
                is_page = (table >= 0) & (table < num_pages)
                table = jnp.where(is_page, table + index[:, None, None] * num_pages, -1)
            table = table.reshape(-1, table.shape[-1])
        if table is None or has_pool:
            keys, values = joined(keys, is_batched[1]), joined(values, is_batched[2])
        if request is not None:
            request = joined(request, is_batched[4]).reshape(size, -1)
            moved = request + index[:, None] * num_slots
            request = jnp.where(request < 0, request, moved).reshape(-1)
        rows = joined(query, is_batched[0])
        out = call(rows, keys, values, table, request, joined(num_keys, is_batched[5]))
        return out.reshape(size, -1, *out.shape[1:]), True

    return call
