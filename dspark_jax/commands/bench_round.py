"""`dspark bench round`: a speculative round and its parts against their floors."""

import argparse
import json
from typing import Any, NamedTuple

from dspark_jax import config
from dspark_jax.commands import failure, options
from dspark_jax.evaluation.part_names import PARTS

SHAPES = ("qwen3-4b", "tiny")
BASE, GRAPH = "base", "graph"
# Captures a whole loop in one CUDA graph, not only what runs between two looks of the
# host at its predicate.
GRAPH_OPTIONS = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,"
    "DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE",
    "xla_gpu_graph_min_graph_size": 1,
}
DEFAULT_CONTEXT = {"qwen3-4b": 2048, "tiny": 64, None: 512}
DEFAULT_CELLS = ["1x7", "128x7", "1x15/64", "128x7/64"]

SUMMARY = "a speculative round and its parts against their floor"
DESCRIPTION = """\
bench round times one speculative round, one step of plain decoding and each part of a
round: the drafter's pass, the Markov loop, the target's pass, the verdict (sampling,
verification, commit) and the drafter's context. Each is a loop of its own on the
device, so that its launch by the host is not measured; all take turns. Beside the times
stand bytes, FLOPs and the floor that the copy bandwidth and the matmul peak of the same
run set. The JSON is saved after every batch size.
"""
EPILOG = """\
examples:
  dspark bench round --batches 1 8 --output round.json --plot round.png
  dspark bench round --shapes qwen3-4b --dtype bfloat16 --batches 1 64
  dspark bench round --batches 1 --parts round plain --accepted-length 3
  dspark bench round --variants attention=xla attention=mosaic_gpu --context 512 4096
  dspark bench round --variants base graph xla_gpu_enable_triton_gemm=false
  dspark bench round --batches --markov-cells 1x7 128x7 1x15/64 --temperature 1

A variant is a list of settings, separated by commas, that all batch sizes run in turn
with the others: base (nothing), graph (the loop as one CUDA graph), candidates=N,
attention=NAME, or a compiler option xla_NAME=VALUE.
--shapes takes random weights of a model's shapes. They accept nothing: times are those
of a round, whatever is accepted. A Markov cell is BATCHxK, or BATCHxK/CANDIDATES.
"""


class Variant(NamedTuple):
    """Settings that set a row of the table apart."""

    name: str
    candidates: int | None
    attention: str | None
    compiler: dict[str, Any]


class Cell(NamedTuple):
    """One shape of the Markov benchmark."""

    name: str
    batch: int
    draft_length: int
    candidates: int | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `dspark bench round`."""
    options.add_drafter(parser)
    add = parser.add_argument_group("round").add_argument
    add("--shapes", choices=SHAPES, help="random weights of these shapes")
    add(
        "--batches",
        type=int,
        nargs="*",
        default=[1, 8, 64],
        metavar="B",
        help="requests that decode together (default 1 8 64)",
    )
    add(
        "--context",
        type=int,
        nargs="+",
        metavar="S",
        help="tokens in the caches (default 2048 for qwen3-4b, else 512); all batch "
        "sizes with each",
    )
    options.add_draft_length(add)
    options.add_rule(add)
    add(
        "--temperature",
        type=float,
        default=0.0,
        metavar="T",
        help="0, the default, is greedy",
    )
    add(
        "--parts",
        nargs="*",
        choices=PARTS,
        default=list(PARTS),
        help="default: all",
    )
    add(
        "--variants",
        nargs="+",
        default=[BASE],
        metavar="V",
        help="settings to compare (default base: as the library runs)",
    )
    add(
        "--markov-cells",
        nargs="*",
        default=DEFAULT_CELLS,
        metavar="BxK/N",
        help=f"the Markov loop alone (default {' '.join(DEFAULT_CELLS)})",
    )
    add(
        "--accepted-length",
        type=float,
        metavar="TAU",
        help="tokens a round, to give tokens/s too",
    )
    add = parser.add_argument_group("measuring").add_argument
    add("--seed", type=int, default=0, metavar="N", help="default 0")
    add(
        "--repeats",
        type=int,
        default=7,
        metavar="N",
        help="times of each loop, in turns (default %(default)s)",
    )
    add(
        "--steps",
        type=int,
        metavar="N",
        help="rounds of a loop (default: a fifth of a second's, at most 256)",
    )
    add(
        "--kernels",
        action="store_true",
        help="also what each kernel takes by itself (NVIDIA GPUs, by CUPTI)",
    )
    add(
        "--time-limit",
        type=float,
        metavar="S",
        help="seconds for everything: later repeats and batch sizes are left out",
    )
    options.add_models(parser)
    options.add_output(
        parser,
        output="write the JSON there, after every batch size",
        plot="write a roofline there",
    )


def run(arguments: argparse.Namespace) -> int:
    """Runs the command and returns its exit status."""
    _check(arguments)
    variants = [_variant(text, arguments.candidates) for text in arguments.variants]
    cells = [_cell(text) for text in arguments.markov_cells]
    from dspark_jax.evaluation import figures, speed_plots

    with failure.of_input():
        if arguments.plot is not None:
            figures.check_installed()

    from dspark_jax.commands import bench_round_output, bench_round_runs

    result = bench_round_runs.measure(arguments, variants, cells)
    if arguments.plot is not None:
        rows = bench_round_output.rows(result)
        speed_plots.roofline(arguments.plot, rows, result["ceiling"])
    if arguments.json:
        print(json.dumps(result))  # noqa: T201
    else:
        bench_round_output.print_table(result)
    return 0


def _check(arguments: argparse.Namespace) -> None:
    """Refuses what can be refused before a model is loaded."""
    if arguments.context is None:
        arguments.context = [DEFAULT_CONTEXT[arguments.shapes]]
    positive = (lambda value: 0 < value < float("inf")), "a positive number"
    rules = {name: options.at_least(1) for name in ("batches", "repeats", "steps")}
    kept = ("draft_vocabulary", "candidates", "draft_length", "seed", "temperature")
    rules |= {name: options.COMMON_RULES[name] for name in kept}
    rules |= {"time_limit": positive, "accepted_length": positive}
    rules["context"] = options.at_least(4 * (1 + (arguments.draft_length or 7)))
    options.check(arguments, rules)
    if not (arguments.batches and arguments.parts) and not arguments.markov_cells:
        raise failure.Failure("--batches or --markov-cells must name something to time")
    options.check_exists(arguments, "drafter", "target")
    options.check_parent("output", arguments.output)
    options.check_parent("plot", arguments.plot)
    for name in ("drafter", "draft_vocabulary"):
        if arguments.shapes is not None and getattr(arguments, name) is not None:
            raise failure.Failure(
                f"{options.option(name)} does not go with --shapes, which makes its own"
            )


def _variant(text: str, candidates: int | None) -> Variant:
    compiler: dict[str, Any] = {}
    attention = None
    for part in text.split(","):
        name, _, value = part.partition("=")
        if name == "candidates" and value.isdecimal() and int(value) > 0:
            candidates = int(value)
        elif name == "attention" and value in config.ATTENTIONS:
            options.check_attention("--variants: attention", value)
            attention = value
        elif name.startswith("xla_") and value:
            compiler[name] = {"true": True, "false": False}.get(value, value)
        elif part == GRAPH:
            compiler |= GRAPH_OPTIONS
        elif part != BASE:
            raise failure.Failure(
                "--variants must be made of base, graph, candidates=N, attention=NAME "
                f"and xla_NAME=VALUE, got {part!r}"
            )
    return Variant(text, candidates, attention, compiler)


def _cell(text: str) -> Cell:
    shape, is_cut, candidates = text.partition("/")
    batch, _, length = shape.partition("x")
    numbers = [batch, length, *([candidates] if is_cut else [])]
    if not all(number.isdecimal() and int(number) > 0 for number in numbers):
        raise failure.Failure(
            f"--markov-cells must be BATCHxK or BATCHxK/CANDIDATES, got {text!r}"
        )
    return Cell(text, int(batch), int(length), int(candidates) if is_cut else None)
