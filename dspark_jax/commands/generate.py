"""`dspark generate`: an answer, a comparison with plain decoding, a conversation."""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from dspark_jax import config
from dspark_jax.commands import failure, options, report, terminal
from dspark_jax.targets import DEFAULT_TARGET

if TYPE_CHECKING:  # They import JAX, which a mistyped option need not wait for.
    from dspark_jax.commands import models
    from dspark_jax.commands.session import Session, Turn

INTERRUPTED = "interrupted"

SUMMARY = "write text, with the target's words, faster than the target alone"
DESCRIPTION = """\
Writes an answer as it is accepted: a drafter proposes a block of tokens, the target
checks the block in one pass, and what remains has exactly the target's distribution.
The first run fetches the default target (93 MB) and compiles; later runs find what is
compiled, also for other prompts of about the same length.
"""
EPILOG = """\
examples:
  dspark generate "Why is the sky blue?"
  dspark generate --compare "Why is the sky blue?"     beside plain decoding
  dspark generate --temperature 0.8 --top-p 0.95 --seed 7 "Write a haiku."
  dspark generate --chat                               a conversation; Ctrl-D ends it
  echo "def fibonacci(n):" | dspark generate --raw     continue a text as it stands
  dspark generate --json "Hi" | jq .accepted_length
  dspark generate --target ./Qwen3-4B --drafter ./dspark_qwen3_4b "Hello"
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `dspark generate`."""
    parser.add_argument(
        "prompt", nargs="?", help="the prompt; without one, or with -, stdin"
    )
    add = parser.add_argument_group("what to write").add_argument
    add("--max-new-tokens", type=int, default=128, metavar="N", help="default 128")
    add(
        "--chat",
        action="store_true",
        help="a conversation: every line of stdin is a turn, only new tokens are fed",
    )
    add("--raw", action="store_true", help="feed the prompt without the chat template")
    add = parser.add_argument_group("sampling").add_argument
    add(
        "--temperature",
        type=float,
        default=0.0,
        metavar="T",
        help="0, the default, always takes the most likely token",
    )
    add("--top-k", type=int, metavar="K", help="among the K most likely tokens")
    add("--top-p", type=float, metavar="P", help="among the fewest that reach mass P")
    add("--min-p", type=float, metavar="P", help="at least P times the most likely one")
    add("--seed", type=int, default=0, metavar="N", help="default 0")
    add = parser.add_argument_group("speculation").add_argument
    add(
        "--rule",
        choices=config.RULES,
        default=config.Speculation().rule,
        help="all three are lossless; 'seeded' gives the words of plain decoding with "
        "this seed at any temperature (default %(default)s)",
    )
    add(
        "--draft-length",
        type=int,
        metavar="K",
        help="default: the drafter's block size",
    )
    add("--candidates", type=int, metavar="N", help="draft among N tokens a position")
    add(
        "--draft-vocabulary",
        type=int,
        metavar="N",
        help="draft among the N most frequent tokens (default: 8192 for the shipped "
        "drafter on a CPU, else all)",
    )
    add(
        "--confidence-threshold",
        type=float,
        metavar="C",
        help="verify a block up to its first slot with a confidence below C",
    )
    add = parser.add_argument_group("models").add_argument
    add(
        "--target",
        default=DEFAULT_TARGET,
        help="smollm2-135m, a Hugging Face folder, a .gguf file or a hub name org/name",
    )
    add(
        "--drafter",
        help="dspark-smollm2-135m, a folder in DeepSpec's layout, prompt-lookup, or "
        "none for plain decoding (default: the shipped one for the default target, "
        "else prompt-lookup)",
    )
    add = parser.add_argument_group("output").add_argument
    add(
        "--compare",
        action="store_true",
        help="run plain decoding too: both speeds, the accepted length, and whether "
        "the words are equal",
    )
    add("--json", action="store_true", help="print one JSON object instead of the text")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command and returns its exit status."""
    started = time.perf_counter()
    _check(arguments)
    prompts = _prompts(arguments)
    first = None if arguments.chat else next(prompts)

    from dspark_jax.commands import reading

    begun = reading.begin(arguments.target)

    from dspark_jax.commands import models

    loaded = models.load(arguments, begun)
    if first is None:
        return _converse(arguments, loaded, prompts)
    session = loaded.session()
    ids = loaded.encode(first)
    warm = None
    if arguments.compare:
        with terminal.status("compiling"), failure.of_input():
            warm = session.warm_up(ids, arguments.max_new_tokens)
    turn, text = _answer(arguments, loaded, session, ids, started)
    if warm is not None:
        # A user who compares nothing has the first token then.
        turn.first_token_seconds = warm.first_token_at - started
    result = report.of_turn(arguments, loaded, turn, text)
    lines = f"[{report.summary(turn)}]"
    if arguments.compare and turn.finish_reason != INTERRUPTED:
        plain = _decode_plainly(arguments, loaded, ids)
        result |= report.of_comparison(arguments, turn, plain)
        lines = report.table(arguments, turn, plain)
    if arguments.json:
        print(json.dumps(result))  # noqa: T201
    elif arguments.compare:
        print(lines)  # noqa: T201
    else:
        _say(lines)
    return 130 if turn.finish_reason == INTERRUPTED else 0


def _check(arguments: argparse.Namespace) -> None:
    """Refuses what can be refused before a model is loaded."""
    rules = (
        ("max_new_tokens", lambda x: x >= 1, "at least 1"),
        ("temperature", lambda x: 0 <= x < float("inf"), "a number >= 0"),
        ("top_k", lambda x: x >= 1, "at least 1"),
        ("top_p", lambda x: 0 < x <= 1, "in (0, 1]"),
        ("min_p", lambda x: 0 <= x <= 1, "in [0, 1]"),
        ("seed", lambda x: 0 <= x < 2**32, "in 0..2^32-1"),
        ("draft_length", lambda x: x >= 1, "at least 1"),
        ("candidates", lambda x: x >= 1, "at least 1"),
        ("draft_vocabulary", lambda x: x >= 1, "at least 1"),
        ("confidence_threshold", lambda x: 0 <= x <= 1, "in [0, 1]"),
    )
    for name, is_valid, rule in rules:
        value = getattr(arguments, name)
        if value is not None and not is_valid(value):
            raise failure.Failure(f"{options.option(name)} must be {rule}, got {value}")
    if arguments.temperature == 0:
        for name in ("top_k", "top_p", "min_p"):
            if getattr(arguments, name) is not None:
                raise failure.Failure(
                    f"{options.option(name)} needs --temperature above 0: without one "
                    "the most likely token is always taken"
                )
    if arguments.chat and arguments.compare:
        raise failure.Failure("--chat and --compare exclude each other")
    if arguments.chat and arguments.raw:
        raise failure.Failure("--chat and --raw exclude each other")
    if arguments.drafter == "none":
        for name in ("compare", "draft_length", "candidates", "confidence_threshold"):
            if getattr(arguments, name):
                raise failure.Failure(
                    f"{options.option(name)} needs a drafter, not none"
                )
    if arguments.drafter in ("none", "prompt-lookup"):
        for name in ("candidates", "draft_vocabulary", "confidence_threshold"):
            if getattr(arguments, name) is not None:
                raise failure.Failure(
                    f"{options.option(name)} needs a trained drafter, not "
                    f"{arguments.drafter}"
                )
    options.check_exists(arguments, "target", "drafter")


def _prompts(arguments: argparse.Namespace) -> Iterator[str]:
    """The prompt, or the turns of a conversation."""
    if arguments.prompt not in (None, "-"):
        yield _clean(arguments.prompt)
        if not arguments.chat:
            return
    elif not arguments.chat:
        if sys.stdin.isatty():
            raise failure.Failure("give a prompt, or pipe one into stdin")
        yield _clean(_read(sys.stdin.read))
        return
    while True:
        try:
            line = _read(input, "> ") if sys.stdin.isatty() else _read(input)
        except EOFError:
            return
        if line.strip():
            yield _clean(line)


def _read(reader: Any, *arguments: str) -> str:
    try:
        return reader(*arguments)
    except UnicodeDecodeError as error:
        raise failure.Failure(f"stdin is not valid UTF-8: {error}") from error


def _clean(prompt: str) -> str:
    if not prompt.strip():
        raise failure.Failure("the prompt is empty")
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise failure.Failure(f"the prompt is not valid UTF-8: {error}") from error
    return prompt


def _answer(
    arguments: argparse.Namespace,
    loaded: "models.Models",
    session: "Session",
    ids: list[int],
    started: float,
    spare: int = 0,
) -> tuple["Turn", str]:
    """One answer and its text, written to stdout as it is accepted."""
    with terminal.status("compiling"), failure.of_input():
        turn = session.start_turn(ids, arguments.max_new_tokens, spare=spare)
    turn.first_token_seconds = turn.first_token_at - started
    stream = loaded.stream()
    text = ""

    def write(piece: str) -> None:
        nonlocal text
        text += piece
        if piece and not arguments.json:
            sys.stdout.write(piece)
            sys.stdout.flush()

    with terminal.interruptible() as is_interrupted:
        while True:
            # The stop token belongs to the tokens, not to the text.
            end = -1 if turn.finish_reason == "stop" else None
            write(stream.push(turn.tokens[:end]))
            if turn.is_running and is_interrupted():
                turn.finish_reason = INTERRUPTED
            if not turn.is_running:
                break
            session.step(turn)
    write(stream.finish())
    if not arguments.json:
        sys.stdout.write("\n")
        sys.stdout.flush()
    return turn, text


def _decode_plainly(
    arguments: argparse.Namespace, loaded: "models.Models", ids: list[int]
) -> "Turn":
    """Plain decoding of the same prompt, not printed."""
    session = loaded.session(is_plain=True)
    with terminal.status("plain decoding"), terminal.interruptible() as is_interrupted:
        session.warm_up(ids, arguments.max_new_tokens)
        plain = session.start_turn(ids, arguments.max_new_tokens)
        while plain.is_running and not is_interrupted():
            session.step(plain)
    if plain.is_running:
        plain.finish_reason = INTERRUPTED
    return plain


def _converse(
    arguments: argparse.Namespace, loaded: "models.Models", prompts: Iterator[str]
) -> int:
    """Turns until the end of stdin; every answer continues the same state."""
    session = loaded.session()
    reports = []
    for prompt in prompts:
        ids = loaded.encode_turn(prompt, session.history)
        spare = 2 * (len(ids) + arguments.max_new_tokens)
        started = time.perf_counter()
        turn, text = _answer(arguments, loaded, session, ids, started, spare)
        reports.append(report.of_turn(arguments, loaded, turn, text))
        if not arguments.json:
            _say(f"[{report.summary(turn)}]")
    if arguments.json:
        print(json.dumps({"turns": reports}))  # noqa: T201
    return 0


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
