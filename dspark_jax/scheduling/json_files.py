"""JSON objects on disk for the host planner: strict to read, atomic to write.

`dspark_jax.tensor_files` does the same for checkpoints; this package imports numpy and
the standard library only.
"""

import json
import os
import pathlib
import tempfile
from collections.abc import Mapping
from typing import Any

MAX_BYTES = 64 * 2**20


def read(path: str | os.PathLike) -> dict[str, Any]:
    """Reads a JSON object.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: not valid JSON, not an object, a key twice, a number that is not
        finite, or more than 64 MiB.
    """
    path = pathlib.Path(path)
    if path.stat().st_size > MAX_BYTES:
        raise ValueError(f"{path} has more than {MAX_BYTES} bytes")
    try:
        values = json.loads(
            path.read_bytes(), object_pairs_hook=_object, parse_constant=_no_constant
        )
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(values).__name__}")
    return values


def write(path: str | os.PathLike, values: Mapping[str, Any]) -> None:
    """Writes a JSON object: the file appears complete or not at all.

    Raises:
      ValueError: a number that is not finite, which is no JSON.
    """
    path = pathlib.Path(path)
    text = json.dumps(values, indent=1, allow_nan=False) + "\n"
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    temporary = pathlib.Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        mask = os.umask(0)  # mkstemp makes private files
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("a key occurs twice")
    return values


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number")
