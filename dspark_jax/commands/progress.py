"""How far a long command is, on stderr: a line that moves, or a line now and then."""

import sys
import time

_ERASE_LINE = "\r\x1b[2K"
_SECONDS_BETWEEN_LINES = 15.0


class Progress:
    """Called with (done, total); says what is done and how long the rest may take."""

    def __init__(self, label: str, unit: str):
        self._label, self._unit = label, unit
        self._begin = self._last = time.monotonic()
        self._is_terminal = sys.stderr.isatty()

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if not self._is_terminal and now - self._last < _SECONDS_BETWEEN_LINES:
            return
        self._last = now
        line = f"{self._label}: {done}/{total} {self._unit}"
        if 0 < done < total:
            rest = (now - self._begin) / done * (total - done)
            line += f", about {_duration(rest)} to go"
        if self._is_terminal:
            sys.stderr.write(f"{_ERASE_LINE}{line}")
        else:
            sys.stderr.write(f"{line}\n")
        sys.stderr.flush()

    def end(self, line: str = "") -> None:
        """Replaces the moving line by `line`."""
        if self._is_terminal:
            sys.stderr.write(_ERASE_LINE)
        if line:
            sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min"
