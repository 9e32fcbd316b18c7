"""The terminal: a status line that leaves no trace, and Ctrl-C between two rounds."""

import contextlib
import functools
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

_ERASE_LINE = "\r\x1b[2K"


@contextlib.contextmanager
def status(message: str) -> Iterator[None]:
    """Shows `message` on stderr while the block runs, if a person can see it."""
    if not sys.stderr.isatty():
        yield
        return
    sys.stderr.write(f"{message} …")
    sys.stderr.flush()
    try:
        yield
    finally:
        sys.stderr.write(_ERASE_LINE)
        sys.stderr.flush()


def print_result(*parts: Any) -> None:
    """Prints tables and sentences on stdout, whole however narrow it is.

    A table that is wider than the terminal is wrapped by it, and no figure is left
    out; in a pipe or a file every row is one line.
    """
    import rich.console

    # Names are not markup: "[x]" in one stays what it is.
    make = functools.partial(
        rich.console.Console,
        file=sys.stdout, highlight=False, markup=False, emoji=False,
    )  # fmt: skip
    endless = make(width=2**16)
    for part in parts:
        console = make()
        if not isinstance(part, str):
            console.width = max(console.width, endless.measure(part).maximum)
        console.print(part, soft_wrap=isinstance(part, str))


@contextlib.contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Within the block Ctrl-C sets a flag, which the yielded function reads.

    A round that has begun is finished: its state was donated, and half a round is none.
    A second Ctrl-C interrupts at once.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    is_interrupted = False

    def note(number: int, frame: Any) -> None:
        nonlocal is_interrupted
        is_interrupted = True
        signal.signal(signal.SIGINT, previous)

    previous = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: is_interrupted
    finally:
        signal.signal(signal.SIGINT, previous)


class Progress:
    """A line on stderr that is rewritten; without a terminal, one every ten seconds."""

    def __init__(self, every: float = 10.0):
        self._every = every
        self._last = float("-inf")

    def show(self, message: str) -> None:
        """Shows the state of affairs."""
        if sys.stderr.isatty():
            sys.stderr.write(f"{_ERASE_LINE}{message}")
        elif time.monotonic() - self._last >= self._every:
            self._last = time.monotonic()
            sys.stderr.write(f"{message}\n")
        sys.stderr.flush()

    def close(self) -> None:
        """Erases the line."""
        if sys.stderr.isatty():
            sys.stderr.write(_ERASE_LINE)
            sys.stderr.flush()
