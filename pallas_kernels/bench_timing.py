"""Clocks and ceilings that all benchmarks share."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import bench_peers


class Timing(NamedTuple):
    """Seconds a call."""

    median: float
    least: float
    most: float

    def microseconds(self) -> dict[str, float]:
        """For a report."""
        return {
            "median_us": round(self.median * 1e6, 2),
            "least_us": round(self.least * 1e6, 2),
            "most_us": round(self.most * 1e6, 2),
        }


def of(seconds: Sequence[float]) -> Timing:
    """Median and spread."""
    return Timing(statistics.median(seconds), min(seconds), max(seconds))


def chained(
    function: Callable[[Any], Any], start: Any, *, calls: int, repetitions: int
) -> Timing:
    """Seconds a call of a compiled function whose result is its next argument.

    Args:
      function: dispatches asynchronously; stands for `calls` calls.
      start: the first argument.
      calls: what a time is divided by.
      repetitions: how often the clock is read.
    """
    state = jax.block_until_ready(function(start))
    started = time.perf_counter()
    state = jax.block_until_ready(function(state))
    count = int(min(max(0.02 / (time.perf_counter() - started), 3), 400))
    seconds = []
    for _ in range(repetitions):
        started = time.perf_counter()
        for _ in range(count):
            state = function(state)
        jax.block_until_ready(state)
        seconds.append((time.perf_counter() - started) / count / calls)
    return of(seconds)


def kernels(function: Callable[..., Any], *arguments: Any) -> list[tuple[str, float]]:
    """Names and microseconds of the kernels that a call launches, by CUPTI.

    The first call of three is left out: what it reads may be in the cache or not.
    """
    from jax.experimental.mosaic.gpu import profiler

    measured = profiler.Cupti().measure(function, aggregate=False, iterations=3)
    _, timings = measured(*arguments)
    if not timings:
        return []
    return [
        (name, round(1e3 * statistics.median(run[at][1] for run in timings[1:]), 2))
        for at, (name, _) in enumerate(timings[0])
    ]


def ceiling() -> dict[str, float]:
    """Copy (read and write) and matmul, the best of several runs."""
    elements = 2**28 if jax.default_backend() == "gpu" else 2**22
    source = jnp.zeros((elements,), jnp.uint32)
    copy = jax.jit(lambda x: x ^ jnp.uint32(1))
    seconds = _best(lambda: copy(source))
    rates = [2 * source.nbytes / seconds / 1e12]
    if (torch_rate := bench_peers.torch_copy_rate()) is not None:
        rates.append(torch_rate)
    del source
    side = 8192 if jax.default_backend() == "gpu" else 256
    # Random, since multiplying equal numbers takes less power and runs faster.
    matrix = jax.random.normal(jax.random.key(0), (side, side), jnp.bfloat16)
    multiply = jax.jit(lambda a: a @ a)
    rate = 2 * side**3 / _best(lambda: multiply(matrix)) / 1e12
    # Significant digits: a slow processor's ceiling must not become 0.
    found = {"copy_tb_per_s": max(rates), "matmul_tflops": rate}
    return {name: float(f"{value:.4g}") for name, value in found.items()}


def _best(function: Callable[[], Any], count: int = 10) -> float:
    jax.block_until_ready(function())
    found = []
    for _ in range(5):
        started = time.perf_counter()
        for _ in range(count):
            out = function()
        jax.block_until_ready(out)
        found.append((time.perf_counter() - started) / count)
    return min(found)
