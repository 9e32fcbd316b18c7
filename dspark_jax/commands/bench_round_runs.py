"""The loops of `dspark bench round`: which are run, for how long, and their JSON."""

import argparse
import concurrent.futures
import gc
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax

from dspark_jax.commands import bench_models, drafters, failure, models, options
from dspark_jax.commands.bench_round import Cell, Variant
from dspark_jax.config import Speculation
from dspark_jax.drafters import dspark
from dspark_jax.evaluation import device_loops, provenance, round_parts, round_state
from dspark_jax.evaluation.part_names import ROUND_PARTS
from dspark_jax.evaluation.round_parts import Part
from dspark_jax.evaluation.round_state import Models, Setting
from dspark_jax.scheduling import json_files
from dspark_jax.targets import decoder
from pallas_kernels import bench_timing

_COMPILERS = 6  # at once
_CELL_CONTEXT = 128  # the Markov loop reads no cache


class _Bench:
    """Runs the loops of one command; `result` is always ready to be saved."""

    def __init__(
        self,
        arguments: argparse.Namespace,
        loaded: Models,
        variants: Sequence[Variant],
        about: dict[str, Any],
    ):
        self._arguments, self._models, self._variants = arguments, loaded, variants
        self._begin = time.perf_counter()
        self._key = jax.random.key(arguments.seed)
        self.result: dict[str, Any] = {
            "command": "bench round",
            **provenance.of_machine(),
            **about,
            "dtype": arguments.dtype,
            "attention": arguments.attention,
            "candidates": arguments.candidates,
            "draft_vocabulary": arguments.draft_vocabulary,
            "rule": arguments.rule,
            "temperature": arguments.temperature,
            "draft_length": self._length,
            "accepted_length": arguments.accepted_length,
            "xla_flags": os.environ.get("XLA_FLAGS", ""),
            "ceiling": bench_timing.ceiling(),
            "points": [],
            "markov": [],
            "is_complete": False,
        }
        self._say(f"ceiling {self.result['ceiling']}")

    def run(self, cells: Sequence[Cell]) -> None:
        """All batch sizes, then the Markov cells."""
        given = self._arguments
        work: list[Any] = [
            self._point(batch, context)
            for context in given.context
            for batch in given.batches
            if given.parts
        ]
        work += [self._cell(cell) for cell in cells]
        until = None
        if given.time_limit is not None:
            until = self._begin + given.time_limit
        for number, run in enumerate(work):
            left = None if until is None else until - time.perf_counter()
            if left is not None and left <= 0:
                self._say("time is up")
                return
            share = None if left is None else left / (len(work) - number)
            run(None if share is None else time.perf_counter() + share)
            gc.collect()  # The next state needs the memory.
            self.save()
        self.result["is_complete"] = True
        self.save()

    def save(self) -> None:
        self.result["seconds"] = time.perf_counter() - self._begin
        if self._arguments.output is not None:
            json_files.write(self._arguments.output, self.result)

    @property
    def _length(self) -> int:
        block_size = self._models.drafter.config.block_size
        return self._arguments.draft_length or block_size

    def _point(self, batch: int, context: int) -> Any:
        def run(deadline: float | None) -> None:
            given = self._arguments
            settings = [
                self._setting(batch, context, self._length, variant)
                for variant in self._variants
            ]
            measured = self._measure(
                self._variants, settings, tuple(given.parts), deadline
            )
            point: dict[str, Any] = {
                "batch": batch,
                "context": context,
                "variants": {},
            }
            for variant, parts in measured.items():
                point["variants"][variant] = {
                    "parts": parts,
                    **_speeds(parts, batch, given.accepted_length),
                }
            self.result["points"].append(point)
            self._say(f"batch {batch} x {context}: {self._times(measured)}")

        return run

    def _cell(self, cell: Cell) -> Any:
        def run(deadline: float | None) -> None:
            variants = [v for v in self._variants if v.candidates is None]
            variants = variants or list(self._variants[:1])
            settings = [
                self._setting(
                    cell.batch,
                    _CELL_CONTEXT + 4 * cell.draft_length,
                    cell.draft_length,
                    variant._replace(candidates=cell.candidates),
                )
                for variant in variants
            ]
            measured = self._measure(variants, settings, ("markov",), deadline)
            self.result["markov"].append(
                cell._asdict()
                | {"variants": {name: p["markov"] for name, p in measured.items()}}
            )
            self._say(f"Markov {cell.name}: {self._times(measured)}")

        return run

    def _setting(
        self, batch: int, context: int, length: int, variant: Variant
    ) -> Setting:
        given = self._arguments
        return Setting(
            batch=batch,
            context=context,
            options=Speculation(
                draft_length=length,
                rule=given.rule,
                candidates=variant.candidates,
            ),
            temperature=given.temperature,
            attention=variant.attention,
        )

    def _measure(
        self,
        variants: Sequence[Variant],
        settings: Sequence[Setting],
        names: tuple[str, ...],
        deadline: float | None,
    ) -> dict[str, dict[str, dict[str, Any]]]:
        """variant -> part -> its times, bytes and floor."""
        given = self._arguments
        state = round_state.make_state(self._key, self._models, settings[0])
        parts: dict[tuple[str, str], Part] = {}
        compilers: dict[tuple[str, str], dict[str, Any]] = {}
        for variant, of_variant in zip(variants, settings, strict=True):
            made = round_parts.make_parts(self._key, self._models, of_variant, names)
            for name, part in made.items():
                parts[variant.name, name] = part
                compilers[variant.name, name] = variant.compiler

        def compiled(at: tuple[str, str]) -> device_loops.Loop:
            part = parts[at]
            try:
                return device_loops.compile_loop(
                    part.step, state, part.inputs, compilers[at]
                )
            except jax.errors.JaxRuntimeError as error:
                if compilers[at] and "INVALID_ARGUMENT" in str(error):
                    raise failure.Failure(
                        f"--variants: {at[0]!r} is refused by the compiler: {error}"
                    ) from error
                raise

        with concurrent.futures.ThreadPoolExecutor(_COMPILERS) as pool:
            loops = dict(zip(parts, pool.map(compiled, parts), strict=True))
        labels = {" ".join(at): at for at in parts}
        timings, state = device_loops.measure(
            {label: loops[at] for label, at in labels.items()},
            state,
            repeats=given.repeats,
            steps=given.steps,
            deadline=deadline,
        )
        listed: dict[tuple[str, str], Any] = {}
        if given.kernels:
            for at, loop in loops.items():
                listed[at], state = device_loops.kernels(loop, state)
        del state
        found: dict[str, dict[str, dict[str, Any]]] = {}
        for label, at in labels.items():
            (variant_name, name), loop, cost = at, loops[at], parts[at].cost
            floor = cost.floor_ms(self.result["ceiling"])
            found.setdefault(variant_name, {})[name] = timings[label].as_json() | {
                "bytes": cost.bytes,
                "bytes_of": {
                    "weights": cost.weights,
                    "cache": cost.cache,
                    "logits": cost.logits,
                },
                "flops": cost.flops,
                "floor_ms": floor,
                "fraction_of_floor": floor / timings[label].median,
                "num_kernels": loop.num_kernels,
                "compile_seconds": loop.compile_seconds,
            }
            if at in listed:
                found[variant_name][name]["kernels"] = listed[at]
                self._say(f"{label}: {_summary(listed[at])}")
        return found

    def _times(self, measured: dict[str, Any]) -> str:
        found = [
            " ".join(f"{name} {part['ms']:.3f}" for name, part in parts.items())
            for parts in measured.values()
        ]
        return " | ".join(map("{}: {}".format, measured, found)) + " ms"

    def _say(self, line: str) -> None:
        sys.stderr.write(f"{time.perf_counter() - self._begin:.0f} s: {line}\n")
        sys.stderr.flush()


def measure(
    arguments: argparse.Namespace, variants: Sequence[Variant], cells: Sequence[Cell]
) -> dict[str, Any]:
    """Runs the command's loops and returns its JSON."""
    loaded, about = _load(arguments)
    length = arguments.draft_length or loaded.drafter.config.block_size
    if length > loaded.drafter.config.block_size:
        raise failure.Failure(
            "--draft-length must be at most the drafter's block size "
            f"{loaded.drafter.config.block_size}, got {length}"
        )
    if max(arguments.context) > loaded.target.config.max_position:
        raise failure.Failure(
            "--context must be at most the target's max_position "
            f"{loaded.target.config.max_position}, got {max(arguments.context)}"
        )
    runs = _Bench(arguments, loaded, variants, about)
    runs.run(cells)
    return runs.result


def _summary(kernels: Sequence[dict[str, Any]]) -> str:
    """The longest kernels of a step, in one line."""
    total = sum(row["us"] for row in kernels)
    count = sum(row["count"] for row in kernels)
    longest = [
        f"{row['name'][:36]} {row['count']:g}x {row['us']:.0f}" for row in kernels[:14]
    ]
    return f"{count:g} kernels {total:.0f} us: {', '.join(longest)}"


def _speeds(
    parts: dict[str, Any], batch: int, accepted_length: float | None
) -> dict[str, Any]:
    """Tokens a second, where both are known: a step's time and its tokens."""
    speeds: dict[str, Any] = {}
    if "plain" in parts:
        speeds["plain_tokens_per_second"] = 1e3 * batch / parts["plain"]["ms"]
    if "round" in parts:
        speeds["rounds_per_second"] = 1e3 / parts["round"]["ms"]
        if accepted_length is not None:
            speeds["tokens_per_second"] = (
                1e3 * batch * accepted_length / parts["round"]["ms"]
            )
    if {"round", *ROUND_PARTS} <= set(parts):
        of_parts = sum(parts[name]["ms"] for name in ROUND_PARTS)
        speeds["sum_of_parts_ms"] = of_parts
    return speeds


def _load(arguments: argparse.Namespace) -> tuple[Models, dict[str, Any]]:
    if arguments.shapes is None:
        source = arguments.drafter or options.default_drafter(
            arguments.target, "bench round"
        )
        loaded = drafters.load(arguments, [source], [])
        (drafter,) = loaded.drafters
        if not isinstance(drafter.params, dspark.DSparkParams):
            raise failure.Failure("--drafter must be a trained one, not prompt-lookup")
        about = {
            "target": os.path.basename(os.path.normpath(arguments.target)),
            "drafter": drafter.describe(),
            "is_random": False,
        }
        return (
            Models(
                loaded.target, loaded.target_params, drafter.drafter, drafter.params
            ),
            about,
        )
    models.keep_compiled_programs()
    with failure.of_input():
        target_config, drafter_config = bench_models.random_configs(arguments)
        target = decoder.make_target(target_config)
        random_drafter = dspark.make_drafter(drafter_config, target)
    key, drafter_key = jax.random.split(jax.random.key(arguments.seed))
    about = {
        "target": f"random weights, shapes of {arguments.shapes}",
        "drafter": {
            "name": "random weights",
            "num_layers": drafter_config.num_layers,
            "block_size": drafter_config.block_size,
            "markov_rank": drafter_config.markov_rank,
        },
        "is_random": True,
    }
    return (
        Models(
            target,
            decoder.init(key, target_config),
            random_drafter,
            dspark.init(drafter_key, drafter_config),
        ),
        about,
    )
