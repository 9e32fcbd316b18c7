"""Ctrl-C and SIGTERM during a run: the step is finished and a checkpoint is taken."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stop:
    """In the block the first signal sets `signal_number`; a second one acts at once.

    The handlers that were there before come back with the first signal, or at the end.
    Outside the main thread, where Python sets no handlers, nothing changes.
    """

    def __init__(self) -> None:
        self.signal_number: int | None = None
        self._previous: dict[int, Any] = {}

    @property
    def is_asked(self) -> bool:
        return self.signal_number is not None

    @property
    def name(self) -> str | None:
        if self.signal_number is None:
            return None
        return signal.Signals(self.signal_number).name

    def __enter__(self) -> "Stop":
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.signal_number = number
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}
