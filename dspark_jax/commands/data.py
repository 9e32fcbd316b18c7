"""`dspark data`: training texts from the target itself or from files."""

import argparse
import pathlib
from collections.abc import Callable
from typing import Any

from dspark_jax.commands import failure
from dspark_jax.targets import DEFAULT_TARGET

SUMMARY = "make training texts, and look at them"
DESCRIPTION = """\
Training texts for drafters, as a corpus folder: tokenised rows with loss masks that are
mapped into memory. A drafter learns best from what its own target writes.
"""
EPILOG = """\
examples:
  dspark data synthesize corpus/                       the target writes everything
  dspark data regenerate prompts.jsonl corpus/         it answers given prompts
  dspark data tokenize conversations.jsonl corpus/     texts that are there already
  dspark data join corpus/ part1/ part2/               one corpus of several
  dspark data show corpus/
  dspark data synthesize --help
"""
_SYNTHESIZE = """\
examples:
  dspark data synthesize corpus/ --tokens 5e6
  dspark data synthesize corpus/ --seconds 600 --seed 1
  dspark data synthesize corpus/ --prompts prompts.jsonl --temperatures 0.7
  dspark data synthesize corpus/ --tokens 1e7 --resume    go on after Ctrl-C

OUT gets corpus.json with the counts (rows dropped by reason, rows kept by domain), the
ids that the target wrote, and conversations.jsonl for people. Every batch is committed.
"""
_REGENERATE = """\
examples:
  dspark data regenerate prompts.jsonl corpus/
  dspark data regenerate chats.jsonl corpus/ --temperature 0.7 --top-p 0.8 --top-k 20
  dspark data regenerate chats.jsonl corpus/ --drafter dspark-smollm2-135m --resume

A line is {"id", "conversations": [{"role", "content"}]}, or has "messages", "turns" (a
list of texts) or "prompt" instead. Answers in it are replaced; every user turn is
answered in turn. Which ids are done stands in OUT/conversations.jsonl.
"""
_TOKENIZE = """\
examples:
  dspark data tokenize conversations.jsonl corpus/
  dspark data tokenize chats.jsonl corpus/ --max-length 4096 --lengths 512 1024 4096
  dspark data tokenize chats.jsonl corpus/ --template qwen     DeepSpec's system turn

Answers and their ends of turn are supervised (DeepSpec's rule). Rows go to the least of
the lengths that fits. A malformed line is an error that names it, unless --skip-bad.
"""
_JOIN = """\
examples:
  dspark data join corpus/ part1/ part2/

For texts that several machines or GPUs wrote side by side (another --seed each), or of
different kinds. Rows that are there already are dropped.
"""
_SHOW = """\
examples:
  dspark data show corpus/
  dspark data show corpus/ --rows 10 --target ./Qwen3-4B

Supervised text stands in ⟦brackets⟧.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the subcommands of `dspark data`."""
    commands = parser.add_subparsers(
        dest="subcommand", metavar="SUBCOMMAND", required=True, title="subcommands"
    )
    add_one = _adder(commands)

    add = add_one("synthesize", _SYNTHESIZE, "the target writes prompts and answers")
    add("out", type=pathlib.Path, metavar="OUT", help="the corpus folder to write")
    add("--tokens", type=float, metavar="N", help="of answers (default 1e6)")
    add("--seconds", type=float, metavar="S", help="time to write for")
    add("--prompts", type=pathlib.Path, metavar="FILE", help="own prompts, JSONL")
    add("--length", type=int, default=320, metavar="N", help="of a row (default 320)")
    add(
        "--max-prompt",
        type=int,
        default=176,
        metavar="N",
        help="longest prompt in tokens (default 176)",
    )
    add(
        "--temperatures",
        type=float,
        nargs="+",
        metavar="T",
        help="of the answers, in equal shares (default: 0, 0.7 and 1 in 20, 35, 45 %%)",
    )
    add(
        "--max-repeated",
        type=float,
        default=0.3,
        metavar="X",
        help="drop rows with a greater share of repeated 20-grams (default 0.3)",
    )
    add(
        "--same-prompt",
        type=int,
        default=4,
        metavar="N",
        help="rows to keep of one and the same prompt (default 4)",
    )
    _add_writing(add)

    add = add_one("regenerate", _REGENERATE, "the target answers given prompts")
    add("prompts", type=pathlib.Path, metavar="PROMPTS", help="a JSONL file")
    add("out", type=pathlib.Path, metavar="OUT", help="the corpus folder to write")
    add("--temperature", type=float, default=0.7, metavar="T", help="default 0.7")
    add("--top-k", type=int, metavar="K", help="among the K most likely tokens")
    add("--top-p", type=float, metavar="P", help="among the fewest that reach mass P")
    add("--min-p", type=float, metavar="P", help="at least P times the likeliest one")
    add(
        "--max-new-tokens",
        type=int,
        default=512,
        metavar="N",
        help="of an answer (default 512)",
    )
    add("--thinking", action="store_true", help="let the template open thoughts")
    add("--drafter", help="speculate with it (default: plain decoding)")
    add("--skip-bad", action="store_true", help="pass over malformed lines")
    _add_lengths(add)
    _add_writing(add)

    add = add_one("tokenize", _TOKENIZE, "conversations to a corpus folder")
    add("conversations", type=pathlib.Path, metavar="CONVERSATIONS", help="JSONL")
    add("out", type=pathlib.Path, metavar="OUT", help="the corpus folder to write")
    add(
        "--template",
        choices=("own", "qwen"),
        default="own",
        help="own: as the tokenizer's template says; qwen: with DeepSpec's system turn "
        "where there is none (default own)",
    )
    add("--skip-bad", action="store_true", help="count malformed lines, and go on")
    _add_lengths(add)
    _add_common(add)

    add = add_one("join", _JOIN, "one corpus of several")
    add("out", type=pathlib.Path, metavar="OUT", help="the corpus folder to write")
    add("sources", type=pathlib.Path, nargs="+", metavar="CORPUS", help="two or more")
    add("--json", action="store_true", help="print one JSON object")

    add = add_one("show", _SHOW, "counts and a few rows of a corpus")
    add("corpus", type=pathlib.Path, metavar="CORPUS", help="a corpus folder")
    add("--rows", type=int, default=3, metavar="N", help="rows to print (default 3)")
    add("--seed", type=int, default=0, metavar="N", help="picks them (default 0)")
    add("--target", default=DEFAULT_TARGET, help="whose tokenizer it is")
    add("--json", action="store_true", help="print one JSON object instead")


def run(arguments: argparse.Namespace) -> int:
    """Runs the subcommand and returns its exit status."""
    _check(arguments)
    from dspark_jax.commands import data_runs

    return getattr(data_runs, arguments.subcommand)(arguments)


def _check(arguments: argparse.Namespace) -> None:
    """Refuses what can be refused before a model is loaded."""
    rules: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
        ("tokens", lambda x: 1 <= x < float("inf"), "at least 1"),
        ("seconds", lambda x: 0 < x < float("inf"), "a number > 0"),
        ("seed", lambda x: 0 <= x < 2**32, "in 0..2^32-1"),
        ("length", lambda x: x >= 2, "at least 2"),
        ("max_prompt", lambda x: x >= 1, "at least 1"),
        ("max_repeated", lambda x: 0 <= x <= 1, "in [0, 1]"),
        ("same_prompt", lambda x: x >= 1, "at least 1"),
        ("batch_rows", lambda x: x >= 1, "at least 1"),
        ("min_loss_tokens", lambda x: x >= 1, "at least 1"),
        ("max_new_tokens", lambda x: x >= 1, "at least 1"),
        ("max_length", lambda x: 2 <= x <= 2**20, "in 2..2^20"),
        ("temperature", lambda x: 0 <= x < float("inf"), "a number >= 0"),
        ("top_k", lambda x: x >= 1, "at least 1"),
        ("top_p", lambda x: 0 < x <= 1, "in (0, 1]"),
        ("min_p", lambda x: 0 <= x <= 1, "in [0, 1]"),
        ("rows", lambda x: x >= 0, "at least 0"),
    )
    for name, is_valid, rule in rules:
        value = getattr(arguments, name, None)
        if value is not None and not is_valid(value):
            option = "--" + name.replace("_", "-")
            raise failure.Failure(f"{option} must be {rule}, got {value}")
    if getattr(arguments, "temperature", None) == 0:
        for name in ("top_k", "top_p", "min_p"):
            if getattr(arguments, name) is not None:
                raise failure.Failure(
                    f"--{name.replace('_', '-')} needs --temperature above 0: without "
                    "one the most likely token is always taken"
                )
    for name in ("prompts", "conversations"):
        path = getattr(arguments, name, None)
        if path is not None and not path.is_file():
            raise failure.Failure(f"no such file: {path}")
    for value in getattr(arguments, "temperatures", None) or ():
        if not 0 <= value < float("inf"):
            raise failure.Failure(f"--temperatures must be >= 0, got {value}")


def _adder(commands: Any) -> Callable[..., Callable]:
    def add_one(name: str, epilog: str, summary: str) -> Callable:
        parser = commands.add_parser(
            name,
            help=summary,
            description=summary[0].upper() + summary[1:] + ".",
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        return parser.add_argument

    return add_one


def _add_lengths(add: Callable) -> None:
    add(
        "--max-length",
        type=int,
        default=2048,
        metavar="N",
        help="longer conversations lose their end (default 2048)",
    )
    add(
        "--lengths",
        type=int,
        nargs="+",
        metavar="N",
        help="lengths of rows (default: --max-length, its half, … down to 128)",
    )


def _add_writing(add: Callable) -> None:
    add("--seed", type=int, default=0, metavar="N", help="default 0")
    add(
        "--batch-rows",
        type=int,
        metavar="N",
        help="rows that are written at a time (default 32 on a CPU, 1024 on a GPU)",
    )
    add("--resume", action="store_true", help="go on where an earlier run stopped")
    _add_common(add)


def _add_common(add: Callable) -> None:
    add(
        "--min-loss-tokens",
        type=int,
        default=14,
        metavar="N",
        help="drop rows with fewer supervised tokens (default 14)",
    )
    add(
        "--target",
        default=DEFAULT_TARGET,
        help="smollm2-135m, a Hugging Face folder, a .gguf file or a hub name",
    )
    add("--json", action="store_true", help="print one JSON object")
