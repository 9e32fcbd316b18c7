"""Conversations in JSONL, one record a line: strict, and every error names file:line.

A record has "conversations" (DeepSpec's word) or "messages", a list of {"role",
"content"}; prompts alone may come as "turns", a list of texts, or "prompt", one text.
"id" and "status" are read, other keys are not.
"""

import dataclasses
import json
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from dspark_jax.targets import chatml

MAX_LINE = 2**26  # bytes


@dataclasses.dataclass(frozen=True)
class Record:
    """One line of a file.

    Attributes:
      name: its "id", or the line's number.
      messages: {"role", "content"} each.
      status: what the writer of the file noted; "error": not to be used.
      where: file:line, for messages.
      error: why the line is malformed, if bad lines are handed out.
    """

    name: str
    messages: tuple[dict[str, str], ...]
    status: str
    where: str
    error: str = ""


def read(path: str | os.PathLike, *, is_lenient: bool = False) -> Iterator[Record]:
    """Reads a JSONL file of conversations, line by line; empty lines are skipped.

    Args:
      is_lenient: hand a malformed line out with its `error` instead of raising.

    Raises:
      ValueError: a malformed line, named as file:line.
    """
    path = pathlib.Path(path)
    with path.open("rb") as file:
        number = 0
        while line := file.readline(MAX_LINE + 1):
            number += 1
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                if len(line) > MAX_LINE:
                    raise ValueError(f"a line has at most {MAX_LINE} bytes")
                yield _record(line, number, where)
            except ValueError as error:
                if not is_lenient:
                    raise ValueError(f"{where}: {error}") from error
                while not line.endswith(b"\n"):  # the rest of a line that is too long
                    line = file.readline(MAX_LINE) or b"\n"
                yield Record(str(number), (), "", where, str(error))


def _record(line: bytes, number: int, where: str) -> Record:
    """Checks one line; the messages of its errors do not name it."""
    try:
        values = json.loads(line)
    except RecursionError as error:
        raise ValueError("not valid JSON: nested too deeply") from error
    except ValueError as error:
        raise ValueError(f"not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"a record must be an object, got {type(values).__name__}")
    name = values.get("id", number)
    if isinstance(name, bool) or not isinstance(name, str | int):
        raise ValueError(f"'id' must be text or an integer, got {name!r}")
    status = values.get("status", "success")
    if not isinstance(status, str):
        raise ValueError(f"'status' must be text, got {status!r}")
    return Record(str(name), _messages(values), status, where)


def _messages(values: Mapping[str, Any]) -> tuple[dict[str, str], ...]:
    """The messages of a record: 'conversations' or 'messages', or user turns alone."""
    names = [n for n in ("conversations", "messages", "turns", "prompt") if n in values]
    if len(names) != 1:
        raise ValueError(
            "a record must have one of 'conversations', 'messages', 'turns' and "
            f"'prompt', got {names or sorted(values)}"
        )
    found = values[names[0]]
    if names[0] == "prompt":
        found = [found]
    if not isinstance(found, list) or not found:
        raise ValueError(f"{names[0]!r} must be a non-empty list")
    if names[0] in ("prompt", "turns"):
        found = [{"role": "user", "content": content} for content in found]
    messages = []
    for index, message in enumerate(found):
        if not isinstance(message, dict) or not {"role", "content"} <= set(message):
            raise ValueError(
                f"message {index} must have the keys 'role' and 'content', got "
                f"{_short(message)}"
            )
        role, content = message["role"], message["content"]
        if role not in chatml.ROLES:
            raise ValueError(
                f"message {index}: role must be one of {chatml.ROLES}, got "
                f"{_short(role)}"
            )
        if not isinstance(content, str):
            raise ValueError(
                f"message {index}: content must be text, got {_short(content)}"
            )
        if any("\ud800" <= letter <= "\udfff" for letter in content):
            raise ValueError(f"message {index}: content is not valid Unicode")
        if role == "system" and index:
            raise ValueError(f"message {index}: only the first one may be the system's")
        messages.append({"role": role, "content": content})
    return tuple(messages)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


class RecordWriter:
    """Appends records to a JSONL file.

    Args:
      path: made if it is not there.
      num_records: records that stay; what follows them is cut off.

    Raises:
      ValueError: the file has fewer records.
    """

    def __init__(self, path: str | os.PathLike, num_records: int = 0):
        self._file = pathlib.Path(path).open("a+b")  # noqa: SIM115 (__exit__ closes)
        self._file.seek(0)
        for number in range(num_records):
            if not self._file.readline().endswith(b"\n"):
                self._file.close()
                raise ValueError(
                    f"{path} must have {num_records} records to go on, it has {number}"
                )
        self._file.truncate(self._file.tell())

    def __enter__(self) -> "RecordWriter":
        return self

    def __exit__(self, *exception: Any) -> None:
        self._file.close()

    def write(self, values: Mapping[str, Any]) -> None:
        """Appends one record."""
        self._file.write(json.dumps(values, ensure_ascii=False).encode() + b"\n")

    def sync(self) -> None:
        """Waits until everything written has reached the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())
