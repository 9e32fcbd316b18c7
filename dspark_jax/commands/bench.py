"""`dspark bench`: serving, or a speculative round, measured on this device."""

import argparse
import json

from dspark_jax import config
from dspark_jax.commands import bench_round, failure, options

DEFAULT_CONCURRENCY = [1, 4, 16]

SUMMARY = "measure serving by mode, or a speculative round against its floor"
DESCRIPTION = """\
bench serve compares the modes of the serving engine under load; bench round times a
speculative round and its parts against their floor, set by copies and products.
"""
EPILOG = """\
examples:
  dspark bench serve --output serve.json --plot serve.png
  dspark bench round --batches 1 8 --output round.json --plot round.png
  dspark bench serve --help
  dspark bench round --help
"""
_SERVE_SUMMARY = "throughput against speed for the user, by mode"
_SERVE_DESCRIPTION = """\
bench serve runs the same list of requests through the serving engine in every mode, in
turns, at several loads: a closed loop (as many requests at once as --concurrency says)
and Poisson arrivals (--rates, requests a second). Greedy or seeded, so that all modes
say the same words. It reports tokens a second, tokens a second and user, the mean
verify window of every domain, and the ratio of each mode to the better of plain and
static with its 95 % interval. Up to three concurrencies share an engine, and everything
is compiled first. The JSON is saved after every repeat of a load.
"""
_SERVE_EPILOG = """\
examples:
  dspark bench serve --output serve.json --plot serve.png
  dspark bench serve --prompts prompts.jsonl --concurrency 1 8 32 --repeats 7
  dspark bench serve --rates 2 8 --modes static compact --time-limit 300
  dspark bench serve --shapes qwen3-4b --replay calibration.json --dtype bfloat16
  dspark bench serve --shapes tiny --replay calibration.json --concurrency 2

--shapes takes random weights of a model's shapes. Words then mean nothing, so that
acceptance is replayed from measured data (the JSON of `dspark calibrate --json`, and
`dspark evaluate --json` for domains); the result says so.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `dspark bench` measures, each with its options."""
    kinds = parser.add_subparsers(
        dest="what", metavar="WHAT", required=True, title="what to measure"
    )
    for name, summary, description, epilog, add in (
        ("serve", _SERVE_SUMMARY, _SERVE_DESCRIPTION, _SERVE_EPILOG, _add_serve),
        (
            "round",
            bench_round.SUMMARY,
            bench_round.DESCRIPTION,
            bench_round.EPILOG,
            bench_round.add_arguments,
        ),
    ):
        kind = kinds.add_parser(
            name,
            help=summary,
            description=description,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        add(kind)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command and returns its exit status."""
    if arguments.what == "round":
        return bench_round.run(arguments)
    return _serve(arguments)


def _add_serve(parser: argparse.ArgumentParser) -> None:
    options.add_drafter(parser)
    add = parser.add_argument_group("load").add_argument
    add("--prompts", metavar="FILE", help="JSON Lines: id, domain, prompt")
    add(
        "--modes",
        nargs="+",
        choices=config.MODES,
        default=["plain", "static", "compact"],
        help="default: plain static compact",
    )
    add(
        "--concurrency",
        type=int,
        nargs="*",
        default=None,
        metavar="N",
        help="closed loops (default 1 4 16, none if --rates are given)",
    )
    add(
        "--rates",
        type=float,
        nargs="*",
        default=[],
        metavar="R",
        help="Poisson arrivals a second, in an engine of --slots",
    )
    add("--slots", type=int, default=16, metavar="N", help="with --rates (default 16)")
    add(
        "--requests",
        type=int,
        metavar="N",
        help="of a trial (default: three for each that runs at once, at least 8)",
    )
    add(
        "--repeats",
        type=int,
        default=3,
        metavar="N",
        help="trials of each mode, in turns (default %(default)s)",
    )
    add(
        "--time-limit",
        type=float,
        metavar="S",
        help="seconds for everything: repeats take in all loads, and what does not fit "
        "is left out",
    )
    add(
        "--max-new-tokens",
        type=int,
        default=96,
        metavar="N",
        help="of an answer, half of it at least (default %(default)s)",
    )
    add(
        "--temperature",
        type=float,
        default=0.0,
        metavar="T",
        help="above 0 by the rule seeded (default 0)",
    )
    add("--seed", type=int, default=0, metavar="N", help="default 0")
    add = parser.add_argument_group("engine").add_argument
    options.add_draft_length(add)
    add("--page-size", type=int, default=16, metavar="N", help="default %(default)s")
    add(
        "--chunk",
        type=int,
        default=32,
        metavar="N",
        help="tokens of a prompt's piece (default %(default)s)",
    )
    add(
        "--rounds-per-step",
        type=int,
        default=1,
        metavar="N",
        help="rounds of one call of the device (default %(default)s)",
    )
    add(
        "--costs",
        metavar="FILE",
        help="a cost table of `dspark profile` (default: measured first)",
    )
    add("--sts", metavar="FILE", help="a calibration of `dspark calibrate`")
    add = parser.add_argument_group("random weights").add_argument
    add("--shapes", choices=bench_round.SHAPES, help="random weights of these shapes")
    add("--replay", metavar="FILE", help="acceptance: of `dspark calibrate --json`")
    add(
        "--replay-domains",
        metavar="FILE",
        help="acceptance by domain: of `dspark evaluate --json`",
    )
    options.add_models(parser)
    options.add_output(
        parser,
        output="write the JSON there, after every repeat",
        plot="write throughput against speed there",
    )


def _serve(arguments: argparse.Namespace) -> int:
    _check(arguments)
    from dspark_jax.evaluation import figures, speed_plots

    with failure.of_input():
        if arguments.plot is not None:
            figures.check_installed()

    from dspark_jax.commands import bench_serve

    result = bench_serve.measure(arguments)
    if arguments.plot is not None:
        speed_plots.throughput(arguments.plot, result["points"])
    if arguments.json:
        print(json.dumps(result))  # noqa: T201
    else:
        bench_serve.print_table(result)
    return 0


def _check(arguments: argparse.Namespace) -> None:
    """Refuses what can be refused before a model is loaded."""
    if arguments.concurrency is None:
        arguments.concurrency = [] if arguments.rates else DEFAULT_CONCURRENCY
    at_least_one = (
        "concurrency",
        "slots",
        "requests",
        "repeats",
        "page_size",
        "chunk",
        "rounds_per_step",
    )
    rules = {name: options.at_least(1) for name in at_least_one}
    kept = (
        "draft_vocabulary",
        "candidates",
        "draft_length",
        "max_new_tokens",
        "seed",
        "temperature",
    )
    rules |= {name: options.COMMON_RULES[name] for name in kept}
    positive = (lambda value: 0 < value < float("inf")), "a positive number"
    rules |= {"rates": positive, "time_limit": positive}
    options.check(arguments, rules)
    if not arguments.concurrency and not arguments.rates:
        raise failure.Failure("--concurrency or --rates must name a load")
    options.check_exists(arguments, "drafter", "target", "prompts", "sts")
    options.check_parent("output", arguments.output)
    options.check_parent("plot", arguments.plot)
    if arguments.shapes is None:
        for name in ("replay", "replay_domains"):
            if getattr(arguments, name) is not None:
                raise failure.Failure(f"{options.option(name)} needs --shapes")
        return
    if arguments.replay is None:
        raise failure.Failure("--shapes needs --replay: random weights accept nothing")
    if arguments.temperature > 0:
        raise failure.Failure("--shapes is for temperature 0: its words are scripted")
    for name in ("prompts", "drafter", "draft_vocabulary", "candidates", "sts"):
        if getattr(arguments, name) is not None:
            raise failure.Failure(
                f"{options.option(name)} does not go with --shapes, which makes its own"
            )


def rule_of(arguments: argparse.Namespace) -> str:
    """The rule under which all modes say the same words."""
    return "seeded" if arguments.temperature > 0 else config.Speculation().rule
