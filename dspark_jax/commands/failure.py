"""How a command says no: one line on stderr and an exit status, never a traceback.

Only what the user's input or machine can cause is caught; a fault of the library keeps
its traceback.
"""

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager

# Arguments of the library, and their options.
_OPTIONS = {
    "options.draft_length": "--draft-length",
    "draft_vocabulary": "--draft-vocabulary",
}


class Failure(Exception):
    """A command cannot go on; `status` is 2 for bad input and 1 for the rest."""

    def __init__(self, message: str, status: int = 2):
        super().__init__(message)
        self.status = status


@contextlib.contextmanager
def of_input(**names: str) -> Iterator[None]:
    """Turns errors of loaders and of argument checks into a Failure.

    Args:
      names: what the command line calls an argument that the library's error names in
        backquotes, as source="--drafter", beside those that have one name everywhere.
    """

    def said(error: Exception) -> str:
        message = str(error)
        for argument, option in (_OPTIONS | names).items():
            message = message.replace(f"`{argument}`", option)
        return message

    try:
        yield
    except (ValueError, TypeError, FileNotFoundError, NotADirectoryError) as error:
        raise Failure(said(error)) from error
    except (ImportError, OSError, RuntimeError) as error:
        raise Failure(said(error), status=1) from error


def of_target() -> AbstractContextManager[None]:
    """`of_input` around the loading of a target."""
    return of_input(source="--target")


def of_drafter() -> AbstractContextManager[None]:
    """`of_input` around the loading of a drafter."""
    return of_input(source="--drafter")
