"""Times `anchor_attention`, forward and backward, and flex_attention of torch.

The figures of memory are those of the compiled program (temporaries) and, for torch,
the peak above what was allocated before.
"""

import dataclasses
import functools
import itertools
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import bench_check, bench_peers, bench_timing, cases
from pallas_kernels.anchor_attention import anchor_attention, mosaic_gpu, tuning

DIFFERENTIATED = ("query", "keys", "values", "own_keys", "own_values")


def results(
    arguments: Any,
    names: Sequence[str],
    peers: Sequence[str],
    chosen: Sequence[cases.AnchorCase],
    deadline: float,
) -> Iterator[dict[str, Any]]:
    """One record for every case, implementation and setting."""
    swept = _swept(arguments.config, names)
    for case in chosen:
        jobs: list[tuple[str, Any]] = [
            (name, config) for name in names for config in _configs(name, case, swept)
        ]
        for name, config in [*jobs, *((peer, None) for peer in peers)]:
            if time.monotonic() > deadline:
                return
            row: dict[str, Any] = {"case": case.name, "implementation": name}
            row["config"] = None if config is None else dataclasses.asdict(config)
            started = time.monotonic()
            try:
                if config is None:
                    row |= PEERS[name](case, arguments.repetitions)
                else:
                    row |= _time(case, name, config, arguments)
            except NotImplementedError as refusal:
                row["refused"] = str(refusal)
            except bench_check.FAILURES:
                row["error"] = traceback.format_exc()[-3000:]
            row["took_s"] = round(time.monotonic() - started, 2)
            yield row


def checks(
    names: Sequence[str], chosen: Sequence[cases.AnchorCase], deadline: float
) -> Iterator[dict[str, Any]]:
    """One record for every case and implementation: errors of output and gradients."""
    for case in chosen:
        arrays, masks = inputs_of(case)
        weights = cases.drawn_on_device(7, arrays["query"].shape, arrays["query"].dtype)
        wide = {key: x.astype(jnp.float32) for key, x in arrays.items()}
        wanted = _run(wide, masks, weights, name="xla", config=None)
        for name in names:
            for config in _checked(name, case):
                if time.monotonic() > deadline:
                    return
                row: dict[str, Any] = {"case": case.name, "implementation": name}
                row["config"] = None if config is None else dataclasses.asdict(config)
                try:
                    found = _run(arrays, masks, weights, name=name, config=config)
                except NotImplementedError as refusal:
                    yield row | {"refused": str(refusal)}
                    continue
                except bench_check.FAILURES:
                    yield row | {"error": traceback.format_exc()[-3000:]}
                    continue
                errors = {key: _error(found[key], wanted[key]) for key in wanted}
                # Large scores make a softmax of one key, whose gradients are rounding.
                bound = 1e-2 if case.magnitude <= 1 else float("inf")
                is_wrong = not errors["out"] <= 1e-2
                is_wrong |= not all(error < bound for error in errors.values())
                yield row | {"relative_errors": errors, "is_wrong": is_wrong}


def _run(*arguments: Any, name: str, config: Any) -> dict[str, jax.Array]:
    call = functools.partial(gradients, name=name, config=config)
    return jax.block_until_ready(jax.jit(call)(*arguments))


def _error(found: jax.Array, wanted: jax.Array) -> float:
    """||found - wanted|| / ||wanted||; where all that is wanted is 0, ||found||."""
    difference = jnp.linalg.norm(jnp.ravel(found.astype(jnp.float32) - wanted))
    norm = jnp.linalg.norm(jnp.ravel(wanted))
    return float(difference / jnp.where(norm > 0, norm, 1.0))


def gradients(
    arrays: dict[str, jax.Array],
    masks: dict[str, jax.Array],
    weights: jax.Array,
    name: str,
    config: Any,
) -> dict[str, jax.Array]:
    """The output, and gradients of its product with the weights."""

    def call(arrays: dict[str, jax.Array]) -> jax.Array:
        return anchor_attention(**arrays, **masks, implementation=name, config=config)

    out, pull = jax.vjp(call, arrays)
    return pull(weights.astype(out.dtype))[0] | {"out": out}


def _checked(name: str, case: cases.AnchorCase) -> list[Any]:
    if name != "mosaic_gpu":
        return [None]
    make = functools.partial(_default, case)
    return [
        make(),
        make(shares_rows=True, takes_turns=False, row_stages=2),
        make(key_tile=64, stages=3, warpgroups=1),
    ]


def _default(case: cases.AnchorCase, **changes: Any) -> tuning.MosaicGpuConfig:
    own = (case.batch, case.anchors, case.slots)
    query = jax.ShapeDtypeStruct((*own, case.heads, case.width), case.dtype)
    keys = (case.batch, case.kv_heads, case.length, case.width)
    shape = mosaic_gpu.shape_of(query, jax.ShapeDtypeStruct(keys, case.dtype))
    return dataclasses.replace(mosaic_gpu.default_config(shape), **changes)


def inputs_of(
    case: cases.AnchorCase,
) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """What is differentiated, and what isn't."""
    inputs = cases.anchor_inputs(case, draw=cases.drawn_on_device)
    arrays = {key: inputs.pop(key) for key in DIFFERENTIATED}
    return arrays, inputs


def shapes_of(case: cases.AnchorCase) -> tuple[dict[str, Any], dict[str, Any]]:
    """`inputs_of`, as shapes only."""
    return jax.eval_shape(lambda: inputs_of(case))


def _kind(name: str) -> Any:
    return tuning.MosaicGpuConfig if name == "mosaic_gpu" else tuning.ChunksConfig


def _swept(fields: Sequence[str], names: Sequence[str]) -> dict[str, list[int]]:
    known = dict.fromkeys(
        field.name for name in names for field in dataclasses.fields(_kind(name))
    )
    swept = {}
    for field in fields:
        key, _, values = field.partition("=")
        if key not in known:
            raise SystemExit(
                f"--config: anchor_attention has {', '.join(known)}, got {key}"
            )
        swept[key] = [int(value) for value in values.split(",")]
    return swept


def _configs(
    name: str, case: cases.AnchorCase, swept: dict[str, list[int]]
) -> list[Any]:
    """All combinations of the settings that this implementation has."""
    start: Any = _default(case) if name == "mosaic_gpu" else tuning.ChunksConfig()
    kinds = {
        field.name: type(getattr(start, field.name))
        for field in dataclasses.fields(start)
    }
    mine = {key: values for key, values in swept.items() if key in kinds}
    return [
        dataclasses.replace(
            start, **{key: kinds[key](x) for key, x in zip(mine, chosen, strict=True)}
        )
        for chosen in itertools.product(*mine.values())
    ]


def _time(
    case: cases.AnchorCase, name: str, config: Any, arguments: Any
) -> dict[str, Any]:
    arrays, masks = inputs_of(case)

    def forward(arrays: dict[str, jax.Array]) -> jax.Array:
        return anchor_attention(**arrays, **masks, implementation=name, config=config)

    def slopes(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
        out, pull = jax.vjp(forward, arrays)
        return pull(out)[0]

    # Results are new arrays, as torch's are; what else is allocated counts as memory.
    both, only = (
        jax.jit(function).lower(arrays).compile() for function in (slopes, forward)
    )
    timings = [
        bench_timing.chained(
            lambda _, run=run: run(arrays),
            None,
            calls=1,
            repetitions=arguments.repetitions,
        )
        for run in (both, only)
    ]
    memory = both.memory_analysis()
    more = {}
    if arguments.kernels:
        more["kernels_us"] = bench_timing.kernels(both, arrays)
    return (
        timings[0].microseconds()
        | {
            "forward_us": round(timings[1].median * 1e6, 2),
            "temporary_mb": round(memory.temp_size_in_bytes / 1e6, 1)
            if memory
            else None,
        }
        | more
    )


def _torch_flex(case: cases.AnchorCase, repetitions: int) -> dict[str, Any]:
    bench_peers.need_torch()
    import torch
    from torch.nn.attention import flex_attention as flex

    rows, length = case.anchors * case.slots, case.length
    places = torch.randperm(length, device="cuda")[: case.anchors].sort().values

    def mask(batch: Any, head: Any, row: Any, key: Any) -> Any:
        block = row // case.slots
        own = (key >= length) & ((key - length) // case.slots == block)
        return ((key < length) & (key < places[block])) | own

    def draw(heads: int, size: int) -> Any:
        shape = (1, heads, size, case.width)
        dtype = getattr(torch, case.dtype)
        return torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True)

    query = draw(case.heads, rows)
    keys, values = (draw(case.kv_heads, length + rows) for _ in range(2))
    blocks = flex.create_block_mask(mask, None, None, rows, length + rows, "cuda")
    # A second length would else be compiled anew, for lengths that vary.
    compiled = torch.compile(flex.flex_attention, dynamic=False)

    def forward() -> Any:
        return compiled(query, keys, values, block_mask=blocks, enable_gqa=True)

    def both() -> None:
        for array in (query, keys, values):
            array.grad = None
        out = forward()
        out.backward(out.detach())

    def timed(function: Callable[[], Any]) -> bench_timing.Timing:
        for _ in range(3):
            function()
        return bench_timing.of(bench_peers.torch_seconds(function, repetitions))

    timing = timed(both)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    both()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    with torch.no_grad():
        only = timed(forward)
    return timing.microseconds() | {
        "forward_us": round(only.median * 1e6, 2),
        "temporary_mb": round(peak / 1e6, 1),
    }


PEERS: dict[str, Callable[[cases.AnchorCase, int], dict[str, Any]]] = {
    "torch_flex": _torch_flex
}
