"""How a command says no: one line on stderr and an exit status, never a traceback.

Only what the user's input or machine can cause is caught; a fault of the library keeps
its traceback.
"""

import contextlib
from collections.abc import Iterator


class Failure(Exception):
    """A command cannot go on; `status` is 2 for bad input and 1 for the rest."""

    def __init__(self, message: str, status: int = 2):
        super().__init__(message)
        self.status = status


@contextlib.contextmanager
def of_input() -> Iterator[None]:
    """Turns errors of loaders and of argument checks into a Failure."""
    try:
        yield
    except (ValueError, TypeError, FileNotFoundError, NotADirectoryError) as error:
        raise Failure(str(error)) from error
    except (ImportError, OSError, RuntimeError) as error:
        raise Failure(str(error), status=1) from error
