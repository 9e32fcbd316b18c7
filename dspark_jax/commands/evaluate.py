"""`dspark evaluate`: what a target accepts of its drafters, and what that saves."""

import argparse
import json
import pathlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from dspark_jax import config
from dspark_jax.commands import failure, options

if TYPE_CHECKING:  # They import JAX, which a mistyped option need not wait for.
    from dspark_jax.commands.drafters import Loaded, NamedDrafter
    from dspark_jax.scheduling.calibration import Calibration

RESULT_FILE = "evaluation.json"
THRESHOLDS = (0.0, 0.2, 0.4, 0.6, 0.8)

SUMMARY = "measure the accepted length of drafters, by domain and by position"
DESCRIPTION = """\
Decodes prompts with every drafter and counts what the target accepts: the accepted
length (τ) of each domain with its spread over prompts, conditional acceptance by draft
position, tokens and acceptance by confidence threshold, how true the confidences are,
and the time against plain decoding and prompt lookup. Prompts are JSON Lines with id,
domain and prompt; without a file, a few that come with the library.
"""
EPILOG = """\
examples:
  dspark evaluate                                     the shipped drafter, 24 prompts
  dspark evaluate --prompts eval.jsonl --temperature 0 1 --output results --plot
  dspark evaluate --drafter a=runs/a/drafters/x b=runs/b/drafters/y --prompts eval.jsonl
  dspark evaluate --rule token block --temperature 1 --limit 10
  dspark evaluate --draft-length 2 4 7                a run for each length
  dspark evaluate --sts sts.json --temperature 1      confidences calibrated (see
                                                      dspark calibrate)
  dspark evaluate --wall-clock --limit 2              time as well, batch 1
  dspark evaluate --json | jq '.runs[0].mean_over_domains'
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `dspark evaluate`."""
    parser.add_argument(
        "--drafter",
        nargs="+",
        action="extend",
        metavar="[NAME=]D",
        help="dspark-smollm2-135m, folders in DeepSpec's layout, or prompt-lookup; "
        "several are compared (default: the shipped one for the default target)",
    )
    add = parser.add_argument_group("prompts").add_argument
    add("--prompts", metavar="FILE", help="JSON Lines: id, domain, prompt")
    add("--limit", type=int, metavar="N", help="prompts of each domain, at most")
    add = options.add_decoding(parser, max_new_tokens=128)
    add(
        "--temperature",
        type=float,
        nargs="+",
        default=[0.0, 1.0],
        metavar="T",
        help="one or several (default 0 1)",
    )
    add(
        "--rule",
        nargs="+",
        choices=config.RULES,
        default=[config.Speculation().rule],
        help="of verification, one or several (default %(default)s); at temperature 0 "
        "they are one",
    )
    add(
        "--draft-length",
        type=int,
        nargs="+",
        metavar="K",
        help="one or several (default: each drafter's block size)",
    )
    add = parser.add_argument_group("confidence").add_argument
    add(
        "--thresholds",
        type=float,
        nargs="*",
        default=list(THRESHOLDS),
        metavar="C",
        help="end a window at the first confidence below C (default 0 .2 .4 .6 .8)",
    )
    add(
        "--threshold-runs",
        action="store_true",
        help="decode once more for each threshold; without it the recorded rounds are "
        "cut, which is exact where they begin",
    )
    add("--sts", metavar="FILE", help="temperatures written by dspark calibrate")
    add = parser.add_argument_group("time").add_argument
    add(
        "--wall-clock",
        type=int,
        nargs="*",
        metavar="B",
        help="time decoding at these batch sizes (without one: 1) beside plain "
        "decoding and prompt lookup, all in turn",
    )
    add("--groups", type=int, default=8, metavar="N", help="batches timed (default 8)")
    add("--repeats", type=int, default=3, metavar="N", help="of a batch (default 3)")
    options.add_models(parser)
    add = parser.add_argument_group("output").add_argument
    add(
        "--output",
        metavar="FOLDER",
        help=f"write {RESULT_FILE} there, after every run",
    )
    add("--plot", action="store_true", help="write figures (PNG) there too")
    add("--json", action="store_true", help="print one JSON object instead of tables")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command and returns its exit status."""
    _check(arguments)
    from dspark_jax.evaluation import figures, prompts, provenance
    from dspark_jax.scheduling import calibration

    with failure.of_input():
        if arguments.plot:
            figures.check_installed()
        chosen = prompts.in_turns(prompts.load(arguments.prompts), arguments.limit)
        sts = None if arguments.sts is None else calibration.read(arguments.sts)
    if sts is not None:
        _check_sts(arguments, sts)
    sources = arguments.drafter or [
        options.default_drafter(arguments.target, "evaluate")
    ]

    from dspark_jax.commands import drafters, evaluate_output, evaluate_runs

    loaded = drafters.load(arguments, sources, chosen)
    _check_drafters(arguments, loaded, sts)
    output = evaluate_output.Output(
        arguments,
        {
            "command": "evaluate",
            **provenance.of_machine(),
            "target": pathlib.PurePath(arguments.target).name,
            "dtype": arguments.dtype,
            "drafters": [drafter.describe() for drafter in loaded.drafters],
            "num_prompts": len(loaded.prompts),
            "prompts": pathlib.PurePath(arguments.prompts or "of the library").name,
            "max_new_tokens": arguments.max_new_tokens,
            "batch": arguments.batch,
            "seed": arguments.seed,
            "candidates": arguments.candidates,
            "draft_vocabulary": arguments.draft_vocabulary,
        },
    )
    with failure.of_input():
        lengths = list(_lengths(arguments, loaded))
        for temperature, rule in _settings(arguments):
            temperatures = None
            if sts is not None and _applies(sts, temperature, rule):
                temperatures = sts.temperatures
            for drafter, length in lengths:
                output.add_run(
                    evaluate_runs.measure(
                        arguments,
                        loaded,
                        drafter,
                        temperature=temperature,
                        rule=rule,
                        length=length,
                        temperatures=temperatures,
                    )
                )
            for batch in _batches(arguments):
                timings = evaluate_runs.compare(
                    arguments,
                    loaded,
                    lengths,
                    temperature=temperature,
                    rule=rule,
                    batch=batch,
                )
                output.add_timings(temperature, rule, batch, timings)
            output.end_of_setting(temperature, rule)
    result = output.end()
    if arguments.json:
        print(json.dumps(result))  # noqa: T201
    return 0


def _check(arguments: argparse.Namespace) -> None:
    """Refuses what can be refused before a model is loaded."""
    options.check(
        arguments,
        options.COMMON_RULES
        | {
            "limit": options.at_least(1),
            "thresholds": (lambda x: 0 <= x <= 1, "in [0, 1]"),
            "wall_clock": options.at_least(1),
            "groups": options.at_least(1),
            "repeats": options.at_least(1),
        },
    )
    options.check_exists(arguments, "drafter", "target", "prompts", "sts")
    if arguments.plot and arguments.output is None:
        raise failure.Failure("--plot needs --output, the folder of the figures")
    if arguments.output is not None:
        path = pathlib.Path(arguments.output)
        if path.exists() and not path.is_dir():
            raise failure.Failure(f"--output must be a folder, got the file {path}")
    if arguments.sts is not None and len(arguments.drafter or [None]) > 1:
        raise failure.Failure("--sts belongs to one drafter: name one --drafter")


def _check_sts(arguments: argparse.Namespace, sts: "Calibration") -> None:
    """Refuses temperatures that none of the runs would use."""
    if not any(_applies(sts, *setting) for setting in _settings(arguments)):
        raise failure.Failure(
            f"--sts was fitted for rule {sts.rule!r} at temperature "
            f"{sts.temperature}, which this run does not have"
        )


def _applies(sts: "Calibration", temperature: float, rule: str) -> bool:
    """Whether a calibration fits; what a file does not say fits everything."""
    return sts.temperature in (None, temperature) and (
        sts.rule in (None, rule) or temperature == 0
    )


def _check_drafters(
    arguments: argparse.Namespace, loaded: "Loaded", sts: "Calibration | None"
) -> None:
    """Refuses what only the drafters' configurations can refuse."""
    for drafter in loaded.drafters:
        size = drafter.drafter.config.block_size
        for length in arguments.draft_length or ():
            if length > size:
                raise failure.Failure(
                    f"--draft-length must be at most the block size {size} of "
                    f"{drafter.name}, got {length}"
                )
        if sts is not None and not drafter.has_confidence:
            raise failure.Failure(
                f"--sts needs a drafter with a confidence head, not {drafter.name}"
            )
        longest = max(arguments.draft_length or [size])
        if sts is not None and len(sts.temperatures) < longest:
            raise failure.Failure(
                f"--sts has {len(sts.temperatures)} temperatures, fewer than the "
                f"{longest} draft positions of {drafter.name}"
            )


def _settings(arguments: argparse.Namespace) -> Iterator[tuple[float, str]]:
    """(temperature, rule); at temperature 0 all rules are one."""
    for temperature in dict.fromkeys(arguments.temperature):
        rules = list(dict.fromkeys(arguments.rule))
        for rule in rules if temperature > 0 else rules[:1]:
            yield temperature, rule


def _lengths(
    arguments: argparse.Namespace, loaded: "Loaded"
) -> Iterator[tuple["NamedDrafter", int]]:
    for drafter in loaded.drafters:
        whole = [drafter.drafter.config.block_size]
        for length in dict.fromkeys(arguments.draft_length or whole):
            yield drafter, length


def _batches(arguments: argparse.Namespace) -> list[int]:
    return [] if arguments.wall_clock is None else arguments.wall_clock or [1]
