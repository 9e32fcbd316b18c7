"""The workloads, named once: tests, benchmark and tuning all take them from here."""

import dataclasses
import functools
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class CachedCase:
    """One call of `cached_attention`.

    Attributes:
      lengths: keys of each request, the new rows' own among them.
      rows: new rows of each request; one number for `block_attention`.
      capacity: keys a request can have; None = the longest, rounded up to 64.
      page: page size; None = a dense cache.
      magnitude: factor of the scores.
      poison: what no row sees is NaN instead of a random number.
    """

    name: str
    kind: str  # "block" or "verify"
    lengths: tuple[int, ...]
    rows: tuple[int, ...] | int
    heads: int = 4
    kv_heads: int = 2
    width: int = 64
    capacity: int | None = None
    page: int | None = None
    window: int | None = None
    dtype: str = "bfloat16"
    magnitude: float = 1.0
    padding: int = 0  # padding rows of "verify"
    poison: bool = True

    @property
    def size(self) -> int:
        """Keys a request can have."""
        return self.capacity or -(-max(*self.lengths, 1) // 64) * 64


@dataclasses.dataclass(frozen=True)
class CachedInputs:
    """Arguments of a case; `page_table` None for a dense cache."""

    query: jax.Array
    keys: jax.Array
    values: jax.Array
    arguments: dict[str, Any]


def _block(
    name: str, lengths: tuple[int, ...], rows: int = 3, **more: Any
) -> CachedCase:
    return CachedCase(name, "block", lengths, rows, **more)


def _verify(
    name: str, lengths: tuple[int, ...], rows: tuple[int, ...], **more: Any
) -> CachedCase:
    return CachedCase(name, "verify", lengths, rows, **more)


SMALL = (
    _block("ragged", (150, 64, 3)),
    _block("empty and one", (0, 1, 65), rows=1),
    _block("tile edges", (63, 64, 65, 128)),
    _block("window", (150, 40, 129), window=70),
    _block("window edge", (128, 192), window=64, capacity=192),
    _block("one head", (100, 130), heads=2, kv_heads=2),
    _block("eight heads a kv head", (100, 190), heads=8, kv_heads=1),
    _block("two tiles of rows", (100, 150), rows=9, heads=8, kv_heads=1),
    _block("three heads, odd capacity", (77, 101), heads=3, kv_heads=1, capacity=104),
    _block("width 128", (70, 130), width=128),
    _block("width 256", (70, 130), width=256, kv_heads=1, heads=2),
    _block("huge logits", (90, 130), magnitude=1e4),
    _block("tiny logits", (90, 130), magnitude=1e-6),
    _block("pages of 64", (150, 64, 5), page=64),
    _block("pages of 16", (47, 16, 130), page=16),
    _block("pages of 128", (150, 129), page=128, window=100),
    _verify("ragged", (150, 64, 3, 90), (3, 1, 2, 4), padding=3),
    _verify("all one row", (1, 129, 65), (1, 1, 1)),
    _verify("idle slots", (40, 0, 130), (2, 0, 3), padding=1),
    _verify("window", (150, 80), (4, 2), window=65),
    _verify("pages of 64", (150, 64, 66), (4, 3, 1), page=64, padding=2),
    _verify("pages of 16, window", (33, 140), (2, 4), page=16, window=30),
    _verify("eight heads, two tiles", (150, 33), (12, 9), heads=8, kv_heads=1),
    _verify("width 128, pages", (70, 130), (3, 1), width=128, page=64, padding=2),
    _verify(
        "width 256, three heads", (70,), (2,), heads=3, kv_heads=1, width=256, padding=2
    ),
)
FLOAT32 = tuple(
    dataclasses.replace(case, name=f"{case.name}, float32", dtype="float32")
    for case in SMALL
    if case.name in ("ragged", "window", "pages of 16", "huge logits", "width 256")
)


def _qwen(name: str, kind: str, lengths: tuple[int, ...], rows: Any, **more: Any):
    return CachedCase(
        name, kind, lengths, rows, heads=32, kv_heads=8, width=128, poison=False, **more
    )


def _ragged(batch: int, low: int, high: int) -> tuple[int, ...]:
    return tuple(int(n) for n in np.random.default_rng(0).integers(low, high, batch))


_LENGTHS = {1: (1024, 2048, 8192), 8: (1024, 2048, 8192), 64: (1024, 8192)}
_CELLS = tuple((b, s) for b, lengths in _LENGTHS.items() for s in lengths)
BENCH = (
    *(_qwen(f"block {b}x{s}", "block", (s,) * b, 7) for b, s in _CELLS),
    _qwen("block 64xragged", "block", _ragged(64, 1024, 8193), 7, capacity=8192),
    _qwen("block 64x8192 K16", "block", (8192,) * 64, 16),
    *(
        _qwen(f"verify paged {b}x{s}", "verify", (s,) * b, (8,) * b, page=64)
        for b, s in ((1, 8192), (8, 8192), (64, 1024), (64, 8192))
    ),
    _qwen(
        "verify paged 64xragged",
        "verify",
        _ragged(64, 1024, 8193),
        tuple(1 + i % 8 for i in range(64)),
        capacity=8192,
        page=64,
    ),
    CachedCase(
        "smollm2 verify 8x1024",
        "verify",
        (1024,) * 8,
        (8,) * 8,
        heads=9,
        kv_heads=3,
        width=64,
        poison=False,
    ),
)


@dataclasses.dataclass(frozen=True)
class AnchorCase:
    """One call of `anchor_attention`: by default at the shapes of Qwen3-4B's drafter.

    Attributes:
      magnitude: factor of the scores.
      is_masked: anchors in any order, some of them dropped, and some slots absent.
    """

    name: str
    length: int
    batch: int = 1
    anchors: int = 512
    slots: int = 7
    heads: int = 32
    kv_heads: int = 8
    width: int = 128
    dtype: str = "bfloat16"
    magnitude: float = 1.0
    is_masked: bool = False


ANCHOR = (AnchorCase("anchor 2048", 2048), AnchorCase("anchor 4096", 4096))
_small = functools.partial(AnchorCase, heads=4, kv_heads=1, width=64, is_masked=True)
ANCHOR_SMALL = (
    _small("ragged", 100, anchors=4),
    _small("long", 210, anchors=9),
    _small("two sequences, two kv heads", 70, batch=2, anchors=2, kv_heads=2),
    _small("three heads a kv head", 100, anchors=5, heads=3),
    _small("one head, one slot", 40, anchors=20, slots=1, heads=2, kv_heads=2),
    _small("eight heads, width 128", 192, anchors=6, slots=8, heads=8, width=128),
    _small("sixteen slots", 70, anchors=5, slots=16),
    _small("fifteen slots, odd length", 131, anchors=5, slots=15, heads=3),
    _small("odd length", 77, anchors=9, slots=7, heads=8, kv_heads=2, width=128),
    _small("many anchors", 700, anchors=70, width=128, heads=8, kv_heads=2),
    _small("no context", 64, anchors=1, slots=3),
    _small("huge logits", 90, anchors=5, magnitude=1e4),
    _small("tiny logits", 90, anchors=5, magnitude=1e-6),
)

Draw = Callable[[int, tuple[int, ...], Any], jax.Array]


def drawn_on_host(seed: int, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Normal numbers; compiles nothing."""
    values = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return jnp.asarray(values.astype(dtype))


def drawn_on_device(seed: int, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Normal numbers, for arrays that the host would take long to fill."""
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def cached_inputs(case: CachedCase, *, draw: Draw = drawn_on_host) -> CachedInputs:
    """Random arguments of a case."""
    dtype = jnp.dtype(case.dtype)
    seed = zlib.crc32(case.name.encode())
    batch, heads, size = len(case.lengths), case.kv_heads, case.size
    rows = case.rows if isinstance(case.rows, tuple) else (case.rows,) * batch
    total = sum(rows) + case.padding
    query = draw(seed, (total, case.heads, case.width), dtype)
    if case.magnitude != 1:
        query = query * jnp.asarray(case.magnitude, dtype)
    shape = (batch, heads, size, case.width)
    found = [draw(seed + more, shape, dtype) for more in (1, 2)]
    first = [
        0 if case.window is None else max(length - count + 1 - case.window, 0)
        for length, count in zip(case.lengths, rows, strict=True)
    ]
    if case.poison:
        if case.kind == "block" and case.window is not None:
            first = [max(length - case.window, 0) for length in case.lengths]
        at = np.arange(size)[None]
        seen = (at < np.asarray(case.lengths)[:, None]) & (
            at >= np.asarray(first)[:, None]
        )
        hidden = np.broadcast_to(~seen[:, None, :, None], shape)
        nan = np.asarray(np.nan, dtype)
        found = [jnp.asarray(np.where(hidden, nan, np.asarray(x))) for x in found]
    arguments: dict[str, Any] = {"window": case.window}
    if case.page is not None:
        found, arguments["page_table"] = _paged(found, case.page)
    lengths = jnp.asarray(case.lengths, jnp.int32)
    if case.kind == "block":
        query = query.reshape(batch, -1, case.heads, case.width)
        return CachedInputs(query, *found, arguments | {"num_keys": lengths})
    slots = np.repeat(np.arange(batch), rows)
    seen_by = np.concatenate(
        [
            np.arange(n - count, n) + 1
            for n, count in zip(case.lengths, rows, strict=True)
        ]
    )
    pad = (0, case.padding)
    arguments["slots"] = jnp.asarray(np.pad(slots, pad, constant_values=-1), jnp.int32)
    arguments["num_keys"] = jnp.asarray(np.pad(seen_by, pad), jnp.int32)
    arguments["max_rows"] = max(rows)
    return CachedInputs(query, *found, arguments)


def cached_shapes(
    case: CachedCase,
) -> tuple[tuple[Any, ...], dict[str, Any], dict[str, Any]]:
    """(query, keys, values), named arrays and static arguments, as shapes only."""
    batch, heads = len(case.lengths), case.heads
    number = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    rows = case.rows if isinstance(case.rows, tuple) else (case.rows,) * batch
    total = sum(rows)
    cache = (batch, case.kv_heads, case.size, case.width)
    arrays = {}
    if case.page is not None:
        pages = -(-case.size // case.page)
        cache = (batch * pages, case.kv_heads, case.page, case.width)
        arrays["page_table"] = number((batch, pages))
    dtype = jnp.dtype(case.dtype)
    keys = jax.ShapeDtypeStruct(cache, dtype)
    query: tuple[int, ...] = (total, heads, case.width)
    static: dict[str, Any] = {"window": case.window}
    if case.kind == "block":
        query = (batch, rows[0], heads, case.width)
        arrays["num_keys"] = number((batch,))
    else:
        arrays |= {"num_keys": number((total,)), "slots": number((total,))}
        static["max_rows"] = max(rows)
    return (jax.ShapeDtypeStruct(query, dtype), keys, keys), arrays, static


def _paged(found: list[jax.Array], page: int) -> tuple[list[jax.Array], jax.Array]:
    # Pages of all requests, shuffled; a page of NaN that no table names is the first.
    batch, heads, size, width = found[0].shape
    count = -(-size // page)
    order = np.random.default_rng(0).permutation(batch * count) + 1
    pages = []
    for array in found:
        array = jnp.pad(array, ((0, 0), (0, 0), (0, count * page - size), (0, 0)))
        array = array.reshape(batch, heads, count, page, width).swapaxes(1, 2)
        array = array.reshape(batch * count, heads, page, width)
        empty = jnp.full((batch * count + 1, heads, page, width), jnp.nan, array.dtype)
        pages.append(empty.at[order].set(array))
    return pages, jnp.asarray(order.reshape(batch, count), jnp.int32)


def anchor_inputs(case: AnchorCase, *, draw: Draw = drawn_on_host) -> dict[str, Any]:
    """Random arguments of a case; anchors in ascending order, if it isn't masked."""
    seed = zlib.crc32(case.name.encode())
    dtype = jnp.dtype(case.dtype)
    own = (case.batch, case.anchors, case.slots)
    context = (case.batch, case.kv_heads, case.length, case.width)
    shapes = {
        "query": (*own, case.heads, case.width),
        "keys": context,
        "values": context,
        "own_keys": (*own, case.kv_heads, case.width),
        "own_values": (*own, case.kv_heads, case.width),
    }
    found: dict[str, Any] = {
        name: draw(seed + i, shape, dtype)
        for i, (name, shape) in enumerate(shapes.items())
    }
    if case.magnitude != 1:
        found["query"] = found["query"] * jnp.asarray(case.magnitude, dtype)
    random = np.random.default_rng(seed)
    if not case.is_masked:
        places = random.permutation(case.length)[: case.anchors]
        places = np.broadcast_to(np.sort(places)[None], own[:2])
        return found | {"num_context": jnp.asarray(places, jnp.int32)}
    places = random.integers(0, case.length + 1, own[:2])
    places[:, 0] = 0
    sizes = random.integers(1, case.slots + 1, (*own[:2], 1))
    kept = random.random(own[:2]) < 0.75
    kept[:, 0] = True
    return found | {
        "num_context": jnp.asarray(places, jnp.int32),
        "present": jnp.asarray(np.arange(case.slots)[None, None] < sizes),
        "kept": jnp.asarray(kept),
    }
