"""Runs a user's callback, whose errors must not stop other requests."""

import contextlib
import types


class CallbackGuard(contextlib.AbstractContextManager):
    """Keeps what the block raises in `error`; interrupts and exits go through."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> bool:
        if isinstance(error, Exception):
            self.error = error
            return True
        return False
