"""Times `cached_attention` and its peers.

Calls are chained: the output of one is the query of the next, and they go through
several caches which together exceed the second-level cache, so that keys come from
memory, and helper kernels and launch gaps count. As in a pass of a model, as many calls
as there are layers share one batch's lengths: which worker reads what is worked out
once for all of them. As in a loop of passes on the device, the host is not asked in
between: a dispatch runs many passes, and what it costs beside them (the addresses in a
CUDA graph change with every dispatch) hardly counts, as it does not for the peers,
whose graphs are replayed as they are.
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
from pallas_kernels.cached_attention import tuning

FLUSH = 130e6  # bytes of caches in rotation: twice the second-level cache of an H200
ENOUGH = 10e-3  # seconds of reading a dispatch, about, ..
MOST_ROUNDS = 64  # .. but no more passes than these
LAYERS = 36  # calls of a pass, with the lengths in common; those of Qwen3-4B
CONFIGS = {"mosaic_gpu": tuning.MosaicGpuConfig, "triton": tuning.TritonConfig}


def results(
    arguments: Any,
    names: Sequence[str],
    peers: Sequence[str],
    chosen: Sequence[cases.CachedCase],
    ceiling: dict[str, float],
    deadline: float,
) -> Iterator[dict[str, Any]]:
    """One record for every case, implementation and setting, and every peer."""
    for case in chosen:
        jobs: list[tuple[str, Any]] = [
            (name, config)
            for name in names
            for config in _sweep(name, arguments.config)
        ]
        jobs += [(peer, None) for peer in peers]
        buffers = None
        for name, config in jobs:
            if time.monotonic() > deadline:
                break
            if buffers is None:
                buffers = _buffers(case)
            row: dict[str, Any] = {"case": case.name, "implementation": name}
            row |= {
                "config": None if config is None else dataclasses.asdict(config),
                **_work(case),
            }
            started = time.monotonic()
            try:
                timing, more = _time(case, buffers, name, config, arguments)
            except NotImplementedError as refusal:
                row["refused"] = str(refusal)
            except bench_check.FAILURES:
                row["error"] = traceback.format_exc()[-3000:]
            else:
                row |= _figures(row, timing, ceiling)
                row |= more
            row["took_s"] = round(time.monotonic() - started, 2)
            yield row


def _sweep(name: str, fields: Sequence[str]) -> list[Any]:
    if not fields or name not in CONFIGS:
        return [None]
    names, values = [], []
    for field in fields:
        key, _, numbers = field.partition("=")
        names.append(key)
        values.append([int(number) for number in numbers.split(",")])
    return [
        CONFIGS[name](**dict(zip(names, combination, strict=True)))
        for combination in itertools.product(*values)
    ]


def _buffers(case: cases.CachedCase) -> list[cases.CachedInputs]:
    first = cases.cached_inputs(case, draw=cases.drawn_on_device)
    size = 2 * first.keys.size * first.keys.dtype.itemsize
    count = int(min(max(-(-FLUSH // size), 2), 16))
    more = [
        dataclasses.replace(
            first, keys=jnp.copy(first.keys), values=jnp.copy(first.values)
        )
        for _ in range(count - 1)
    ]
    jax.block_until_ready([(one.keys, one.values) for one in more])
    return [first, *more]


def _time(
    case: cases.CachedCase,
    buffers: list[cases.CachedInputs],
    name: str,
    config: Any,
    arguments: Any,
) -> tuple[bench_timing.Timing, dict[str, Any]]:
    if name in bench_peers.TORCH:
        seconds = bench_peers.TORCH[name](case, len(buffers), arguments.repetitions)
        return bench_timing.of(seconds), {}

    least = _work(case)["bytes"] / 4e12
    rounds = 1  # where calls are slow and a dispatch is cheap
    if jax.default_backend() == "gpu":
        rounds = min(max(int(-(-ENOUGH // (least * LAYERS))), 1), MOST_ROUNDS)
    make = functools.partial(_call, case, name, config)
    first = buffers[0]
    stored = [(one.keys, one.values) for one in buffers]
    call = jax.jit(make(first))
    out = jax.block_until_ready(call(first.query, *stored[0]))
    reference = bench_check.call_of(case, first, implementation="xla", config=None)
    error = bench_check.relative_error(out, jax.jit(reference)(first.query, *stored[0]))
    arrays = {
        field: value
        for field, value in first.arguments.items()
        if isinstance(value, jax.Array)
    }
    run = chain(make, first, rounds).lower(first.query, stored, arrays).compile()
    timing = bench_timing.chained(
        lambda query: run(query, stored, arrays),
        first.query,
        calls=rounds * LAYERS,
        repetitions=arguments.repetitions,
    )
    more: dict[str, Any] = {"relative_error": error, "is_wrong": not error <= 2e-2}
    if arguments.kernels:
        more["kernels_us"] = bench_timing.kernels(call, first.query, *stored[0])
    return timing, more


def _call(
    case: cases.CachedCase, name: str, config: Any, inputs: cases.CachedInputs
) -> Callable[..., jax.Array]:
    """An implementation or a peer as a function of (query, keys, values)."""
    if name in bench_peers.PEERS:
        return bench_peers.PEERS[name](case, inputs)
    return bench_check.call_of(case, inputs, implementation=name, config=config)


def chain(
    make: Callable[[cases.CachedInputs], Callable[..., jax.Array]],
    first: cases.CachedInputs,
    rounds: int,
) -> Any:
    """`rounds` passes of LAYERS calls each: jitted, of (query, caches, arrays).

    Args:
      make: makes a call that closes over the lengths (and tables) of its inputs.
      first: inputs, whose lengths the last argument of the result takes the place of.
      rounds: passes.
    """

    def run(
        query: jax.Array,
        stored: list[tuple[jax.Array, jax.Array]],
        arrays: dict[str, jax.Array],
    ) -> jax.Array:
        def one_round(_: Any, query: jax.Array) -> jax.Array:
            # Every pass could have other lengths: nothing of them is worked out ahead.
            query, fresh = jax.lax.optimization_barrier((query, arrays))
            inputs = dataclasses.replace(first, arguments=first.arguments | fresh)
            call = jax.jit(make(inputs))  # one kernel is compiled for all layers
            for layer in range(LAYERS):
                query = call(query, *stored[layer % len(stored)])
            return query

        return jax.lax.fori_loop(0, rounds, one_round, query)

    return jax.jit(run)


def _work(case: cases.CachedCase) -> dict[str, float]:
    rows = (
        case.rows if isinstance(case.rows, tuple) else (case.rows,) * len(case.lengths)
    )
    size = jnp.dtype(case.dtype).itemsize
    read = [n if case.window is None else min(n, case.window) for n in case.lengths]
    pairs = sum(n * count for n, count in zip(read, rows, strict=True))
    return {
        "bytes": 2 * sum(read) * case.kv_heads * case.width * size,
        "flops": 4 * pairs * case.heads * case.width,
    }


def _figures(
    row: dict[str, Any], timing: bench_timing.Timing, ceiling: dict[str, float]
) -> dict[str, Any]:
    floor = row["bytes"] / (ceiling["copy_tb_per_s"] * 1e12)
    return timing.microseconds() | {
        "floor_us": round(floor * 1e6, 2),
        "fraction": round(floor / timing.median, 4),
        "tflops": round(row["flops"] / timing.median / 1e12, 2),
    }
