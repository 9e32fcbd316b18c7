"""The command line: `dspark COMMAND …`.

Parsing and checks need no JAX, so that `--help` and a mistyped option answer at once.
Results go to stdout; progress, logs and errors to stderr. Exit status: 0 done,
1 failed, 2 bad input, 130 interrupted, 141 the reader of stdout went away, 143 ended
by SIGTERM.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import dspark_jax
from dspark_jax.commands import failure

COMMANDS = ("generate", "train", "data", "evaluate", "calibrate", "profile", "bench")

_EPILOG = """\
examples:
  dspark generate "Why is the sky blue?"
  dspark generate --compare "Why is the sky blue?"
  dspark data synthesize corpus/
  dspark COMMAND --help
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `dspark` with these arguments (None: the process's); returns the status."""
    arguments = make_parser().parse_args(argv)
    try:
        status = arguments.run(arguments)
        sys.stdout.flush()
        return status
    except failure.Failure as error:
        message = " ".join(str(error).split())
        sys.stderr.write(f"dspark {arguments.command}: error: {message}\n")
        return error.status
    except BrokenPipeError:
        # Python flushes stdout once more at exit and would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        sys.stderr.write("\n")
        return 130


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = _Parser(
        prog="dspark",
        description="Lossless speculative decoding with DSpark, in JAX.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--version", action="version", version=f"dspark-jax {dspark_jax.__version__}"
    )
    commands = parser.add_subparsers(
        dest="command", metavar="COMMAND", required=True, title="commands"
    )
    for name in COMMANDS:
        module = importlib.import_module(f"dspark_jax.commands.{name}")
        command = commands.add_parser(
            name,
            help=module.SUMMARY,
            description=module.DESCRIPTION,
            epilog=module.EPILOG,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


if __name__ == "__main__":
    sys.exit(main())
