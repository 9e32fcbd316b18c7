"""Runs a user's callback, which must not stop the engine half-way through a step."""

import contextlib
import types


class CallbackGuard(contextlib.AbstractContextManager):
    """Keeps what the block raises: an error, or an interrupt to be raised later."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.interrupt: BaseException | None = None  # KeyboardInterrupt, SystemExit

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> bool:
        if isinstance(error, Exception):
            self.error = error
        else:
            self.interrupt = error
        return True
