"""The terminal: a status line that leaves no trace, and Ctrl-C between two rounds."""

import contextlib
import signal
import sys
import threading
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
