"""`dspark profile`: what the steps of a serving engine cost on this device."""

import argparse
import dataclasses
import json
import pathlib
import time
from typing import TYPE_CHECKING, Any

from dspark_jax.commands import failure, options, unpriced

if TYPE_CHECKING:  # They import JAX.
    from collections.abc import Sequence

    from dspark_jax.commands.drafters import Loaded
    from dspark_jax.scheduling.costs import Costs
    from dspark_jax.serving import Engine
    from dspark_jax.serving.profile import Measured

SUMMARY = "measure what a serving engine's steps cost on this device"
DESCRIPTION = """\
Runs every compiled shape of a serving engine (requests x packed tokens) at several
context lengths and writes the seconds of a step: the cost table that `compact` serving
buys its verify windows by. A table belongs to one device, pair of models, precision and
draft length. Measure on an otherwise idle machine.
"""
EPILOG = """\
examples:
  dspark profile --output costs.json --plot costs.png
  dspark profile --slots 64 --max-length 4096 --dtype bfloat16 --output costs.json
  dspark profile --slots 4 --buckets 4x4 4x16 4x32 --context-lengths 64 512
  dspark profile --drafter runs/a/drafters/x --json | jq .steps

A bucket is REQUESTSxTOKENS; as many tokens as requests is a step without a draft.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `dspark profile`."""
    options.add_drafter(parser)
    add = parser.add_argument_group("engine").add_argument
    add(
        "--slots",
        type=int,
        default=16,
        metavar="N",
        help="requests that run at once (default %(default)s)",
    )
    add(
        "--max-length",
        type=int,
        default=1024,
        metavar="N",
        help="tokens of a request, prompt included (default %(default)s)",
    )
    add(
        "--page-size",
        type=int,
        default=16,
        metavar="N",
        help="positions a page of the cache (default %(default)s)",
    )
    add(
        "--buckets",
        nargs="+",
        metavar="RxT",
        help="compiled shapes, requests x packed tokens (default: the engine's)",
    )
    options.add_rule(add)
    options.add_draft_length(add)
    add(
        "--greedy", action="store_true", help="an engine that serves temperature 0 only"
    )
    add = parser.add_argument_group("measuring").add_argument
    add(
        "--context-lengths",
        type=int,
        nargs="+",
        metavar="N",
        help="tokens that each request has (default: a sixteenth, a quarter and all "
        "that fits)",
    )
    add(
        "--steps",
        type=int,
        default=8,
        metavar="N",
        help="in a row for one time (default %(default)s)",
    )
    add(
        "--repeats",
        type=int,
        default=5,
        metavar="N",
        help="times of each shape; the median counts (default %(default)s)",
    )
    add(
        "--fastest",
        action="store_true",
        help="the fastest time counts: for a machine that others use too",
    )
    options.add_models(parser)
    options.add_output(
        parser,
        output="write the cost table there, as JSON",
        plot="write a figure of it there",
    )


def run(arguments: argparse.Namespace) -> int:
    """Runs the command and returns its exit status."""
    buckets = _check(arguments)
    if arguments.plot is not None:
        from dspark_jax.evaluation import figures, speed_plots

        with failure.of_input():
            figures.check_installed()
    source = arguments.drafter or options.default_drafter(arguments.target, "profile")

    from dspark_jax.commands import drafters, terminal
    from dspark_jax.commands.progress import Progress
    from dspark_jax.scheduling import cost_files
    from dspark_jax.serving import profile

    loaded = drafters.load(arguments, [source], [])
    begin = time.perf_counter()
    with failure.of_input():
        engine = _engine(arguments, loaded, buckets)
        lengths = arguments.context_lengths
        if lengths is None:
            lengths = profile.default_context_lengths(engine, arguments.steps)
        elif max(lengths) > engine.max_measured_context(arguments.steps):
            raise failure.Failure(
                "--context-lengths must be at most "
                f"{engine.max_measured_context(arguments.steps)}, so that --steps fit "
                f"--max-length, got {max(lengths)}"
            )
        with terminal.status("compiling the engine's programs"):
            warm_up_seconds = engine.warm_up()
        progress: Progress = Progress("measuring", "times")
        measured = profile.measure_steps(
            engine,
            lengths,
            num_steps=arguments.steps,
            repeats=arguments.repeats,
            progress=progress,
        )
        progress.end(
            f"compiled {engine.num_programs} programs in {warm_up_seconds:.1f} s, "
            f"measured {len(measured)} steps {arguments.repeats} times"
        )
        costs = profile.make_costs(
            measured, _info(arguments, loaded), is_fastest=arguments.fastest
        )
        result = _result(arguments, costs, measured)
        result["warm_up_seconds"] = warm_up_seconds
        result["seconds"] = time.perf_counter() - begin
        if arguments.output is not None:
            cost_files.write(arguments.output, costs)
        if arguments.plot is not None:
            speed_plots.step_costs(arguments.plot, costs)
    if arguments.json:
        print(json.dumps(result))  # noqa: T201
    else:
        _print_table(result)
    return 0


def _check(arguments: argparse.Namespace) -> "list[tuple[int, int]] | None":
    """Refuses what can be refused before a model is loaded; the buckets as numbers."""
    names = ("slots", "max_length", "page_size", "context_lengths", "steps", "repeats")
    rules = {name: options.at_least(1) for name in names}
    kept = ("draft_vocabulary", "candidates", "draft_length")
    rules |= {name: options.COMMON_RULES[name] for name in kept}
    options.check(arguments, rules)
    lengths = arguments.context_lengths
    if lengths is not None and lengths != sorted({*lengths}):
        raise failure.Failure(
            f"--context-lengths must be strictly increasing, got {lengths}"
        )
    options.check_exists(arguments, "drafter", "target")
    options.check_parent("output", arguments.output)
    options.check_parent("plot", arguments.plot)
    if arguments.buckets is None:
        return None
    return [_bucket(text) for text in arguments.buckets]


def _bucket(text: str) -> tuple[int, int]:
    requests, _, tokens = text.partition("x")
    numbers = [int(x) for x in (requests, tokens) if x.isascii() and x.isdigit()]
    if len(numbers) != 2 or max(numbers) > 2**31 or not 1 <= numbers[0] <= numbers[1]:
        raise failure.Failure(
            "--buckets must be REQUESTSxTOKENS, as 4x32, tokens at least requests at "
            f"least 1, got {text!r}"
        )
    return numbers[0], numbers[1]


def _engine(
    arguments: argparse.Namespace,
    loaded: "Loaded",
    buckets: "list[tuple[int, int]] | None",
) -> "Engine":
    from dspark_jax import serving

    (drafter,) = loaded.drafters
    shapes = None
    if buckets is not None:
        shapes = tuple(serving.Bucket(*bucket) for bucket in buckets)
    settings = serving.EngineConfig(
        mode="compact",
        num_slots=arguments.slots,
        max_length=arguments.max_length,
        page_size=arguments.page_size,
        rule=arguments.rule,
        draft_length=arguments.draft_length,
        candidates=arguments.candidates,
        buckets=shapes,
        sampling_fields=() if arguments.greedy else ("temperature",),
    )
    models = loaded.target, loaded.target_params, drafter.drafter, drafter.params
    with unpriced.engines():
        return serving.Engine(*models, config=settings)


def _info(arguments: argparse.Namespace, loaded: "Loaded") -> dict[str, Any]:
    """What a table belongs to."""
    from dspark_jax.evaluation import provenance

    (drafter,) = loaded.drafters
    length = arguments.draft_length or drafter.drafter.config.block_size
    return {
        **provenance.of_machine(),
        "target": pathlib.PurePath(arguments.target).name,
        "drafter": drafter.name,
        "dtype": arguments.dtype,
        "rule": arguments.rule,
        "draft_length": length,
        "draft_vocabulary": arguments.draft_vocabulary,
        "candidates": arguments.candidates,
        "is_greedy": arguments.greedy,
        "num_slots": arguments.slots,
        "max_length": arguments.max_length,
        "page_size": arguments.page_size,
        "steps_per_time": arguments.steps,
        "repeats": arguments.repeats,
        "statistic": "fastest" if arguments.fastest else "median",
    }


def _result(
    arguments: argparse.Namespace, costs: "Costs", measured: "Sequence[Measured]"
) -> dict[str, Any]:
    from dspark_jax.scheduling.costs import Grid
    from dspark_jax.serving import profile

    surfaces = [s for s in (costs.drafting, costs.plain) if isinstance(s, Grid)]
    additive, worst = profile.additive_model(surfaces[0])
    return {
        "command": "profile",
        **costs.info,
        "steps": [step._asdict() for step in measured],
        # How much noise had to be taken out of the table, relative.
        "repair": max(surface.repair for surface in surfaces),
        # The first-order model of the speculative steps, and how far it is from them.
        "additive": {**dataclasses.asdict(additive), "worst_relative_error": worst},
        "output": arguments.output,
    }


def _print_table(result: dict[str, Any]) -> None:
    import rich.table

    from dspark_jax.commands import terminal

    table = rich.table.Table(
        title=f"ms of the steps of {result['target']} with {result['drafter']} on "
        f"{result['device']}, {result['dtype']}"
    )
    for name in (
        "requests",
        "tokens",
        "drafts",
        "context",
        "median",
        "fastest",
        "slowest",
    ):
        table.add_column(name, justify="right")
    for step in result["steps"]:
        times = (step[name] for name in ("seconds", "fastest", "slowest"))
        table.add_row(
            str(step["requests"]),
            str(step["packed_tokens"]),
            "yes" if step["is_drafting"] else "no",
            str(step["context_tokens"]),
            *(f"{1e3 * seconds:.2f}" for seconds in times),
        )
    additive = result["additive"]
    terminal.print_result(
        table,
        f"additive model: {1e3 * additive['bias_seconds']:.2f} ms and "
        f"{1e9 * additive['context_seconds']:.2f} ns a context token, off by up to "
        f"{100 * additive['worst_relative_error']:.0f} %; the table was changed by up "
        f"to {100 * result['repair']:.0f} % to make it monotone",
    )
