"""Times of steps inside one loop on the device: what a step takes without its launch.

A step takes the state that all steps of a bench share, and its own results of the time
before. They are carried through the loop: nothing that a step computes can be left out
or moved before the loop, as long as it depends on the state.
"""

import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dspark_jax.types import PyTree

# (state, inputs) -> (state, results)
Step = Callable[[PyTree, PyTree], tuple[PyTree, PyTree]]

_CALL_SECONDS = 0.2  # of one call, if _MOST_STEPS allow: its launch counts little
_MOST_STEPS = 256

# In the text of a compiled program: "  %name = TYPE operation(...".
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?\S+ = .*? ?([a-z][\w-]*)\(")
_BODY = re.compile(r"body=%?([\w.-]+)")
_SILENT = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while",
    "after-all", "iota", "partition-id", "opt-barrier",
}  # fmt: skip


class Loop(NamedTuple):
    """A compiled loop over one step."""

    run: Callable[..., tuple[PyTree, PyTree]]  # (count, state, results, inputs)
    results: PyTree
    inputs: PyTree
    compile_seconds: float
    num_kernels: int | None  # launched by one step, as the compiled program lists them


class Timing(NamedTuple):
    """Milliseconds a step."""

    median: float
    least: float
    most: float
    times: tuple[float, ...]
    num_steps: int  # of a call

    def as_json(self) -> dict[str, Any]:
        """For a report."""
        return {
            "ms": self.median,
            "least_ms": self.least,
            "most_ms": self.most,
            "times_ms": list(self.times),
            "num_repeats": len(self.times),
            "steps_per_call": self.num_steps,
        }


def compile_loop(
    step: Step, state: PyTree, inputs: PyTree, options: Mapping[str, Any] | None = None
) -> Loop:
    """Compiles a loop over `step` with a traced count; donates state and results.

    Args:
      state, inputs: arrays, or their shapes.
      options: of the compiler, by name ("xla_...").
    """

    def run(count, state, results, inputs):
        def body(_, carry):
            state, _ = carry
            return step(state, inputs)

        return jax.lax.fori_loop(0, count, body, (state, results))

    _, shapes = jax.eval_shape(step, state, inputs)
    begin = time.perf_counter()
    jitted = jax.jit(run, donate_argnames=("state", "results"))
    lowered = jitted.lower(jnp.int32(0), state, shapes, inputs)
    compiled = lowered.compile(compiler_options=dict(options or {}) or None)
    seconds = time.perf_counter() - begin
    results = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    return Loop(
        compiled, results, inputs, seconds, _num_kernels(compiled.as_text() or "")
    )


def measure(
    loops: Mapping[str, Loop],
    state: PyTree,
    *,
    repeats: int,
    steps: int | None = None,
    deadline: float | None = None,
) -> tuple[dict[str, Timing], PyTree]:
    """Times loops in turns; returns their times and the state.

    Args:
      loops: all over `state`, which they hand on to one another.
      repeats: times of each loop.
      steps: of one call; None: as many as take a fifth of a second, at most 256.
      deadline: of `time.perf_counter`; after it no further repeat begins.
    """
    results = {name: loop.results for name, loop in loops.items()}

    def seconds(name: str, count: int) -> float:
        nonlocal state
        loop = loops[name]
        number = jax.block_until_ready(jnp.int32(count))
        begin = time.perf_counter()
        state, results[name] = loop.run(number, state, results[name], loop.inputs)
        jax.block_until_ready((state, results[name]))
        return time.perf_counter() - begin

    counts = {}
    for name in loops:
        seconds(name, 1)
        one = min(seconds(name, 2) / 2 for _ in range(2))
        counts[name] = steps or min(max(int(_CALL_SECONDS / one), 2), _MOST_STEPS)
    times: dict[str, list[float]] = {name: [] for name in loops}
    for repeat in range(repeats):
        if repeat and deadline is not None and time.perf_counter() > deadline:
            break
        for name in loops:
            times[name].append(1e3 * seconds(name, counts[name]) / counts[name])
    return {name: _timing(found, counts[name]) for name, found in times.items()}, state


def kernels(
    loop: Loop, state: PyTree, steps: int = 4
) -> tuple[list[dict[str, Any]], PyTree]:
    """What the kernels of a step take by themselves, by CUPTI; returns the state too.

    Kernels whose names differ by a number only are one row; longest first. Empty where
    no kernels are recorded (on a CPU).
    """
    if jax.default_backend() != "gpu":
        return [], state
    from jax.experimental.mosaic.gpu import profiler

    running = _Running(loop, state, steps)
    _, timings = profiler.Cupti().measure(running, aggregate=False)()
    rows: dict[str, list[float]] = {}
    for name, milliseconds in timings or ():
        rows.setdefault(re.sub(r"[._]?\d+", "", name), []).append(milliseconds)
    found = [
        {"name": name, "count": len(times) / steps, "us": 1e3 * sum(times) / steps}
        for name, times in rows.items()
    ]
    return sorted(found, key=lambda row: -row["us"]), running.state


class _Running:
    """A loop that goes on where its last call ended: its arguments are donated.

    The profiler would trace a plain function; what can be traced itself it calls.
    """

    def __init__(self, loop: Loop, state: PyTree, steps: int):
        self._loop, self._steps, self.state = loop, steps, state
        # Those of the loop were donated when it was timed.
        self._results = jax.tree.map(
            lambda x: jnp.zeros(x.shape, x.dtype), loop.results
        )

    def __call__(self) -> PyTree:
        self.state, self._results = self._loop.run(
            jnp.int32(self._steps), self.state, self._results, self._loop.inputs
        )
        return self._results

    def trace(self) -> Any:
        """Of `jax.stages.Wrapped`, which the profiler asks for."""
        raise NotImplementedError("a compiled loop is not traced again")

    lower = trace


def _timing(times: Sequence[float], count: int) -> Timing:
    return Timing(statistics.median(times), min(times), max(times), tuple(times), count)


def _num_kernels(text: str) -> int | None:
    """Instructions of the largest loop body that launch a kernel; None without a loop.

    Fusions, calls of libraries, copies and all else that runs by itself. What only
    names memory does not count.
    """
    found: dict[str, int] = {}
    name = ""
    for line in text.splitlines():
        if line.endswith("{") and not line.startswith(" "):
            name = line.split(" ", 1)[0].lstrip("%")
            found[name] = 0
        elif match := _INSTRUCTION.match(line):
            found[name] += match[1] not in _SILENT
    bodies = [body for body in _BODY.findall(text) if body in found]
    return max((found[body] for body in bodies), default=None)
