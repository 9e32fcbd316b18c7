"""Prompts to evaluate on: a JSON Lines file, or the few that come with the library.

A line is {"id": …, "domain": …, "prompt": …}, all strings. Conversations, as `dspark
data` writes them and DeepSpec reads them, serve too: the prompt is the first user turn.
"""

import importlib.resources
import itertools
import json
import os
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

FIELDS = ("id", "domain", "prompt")
SHIPPED_FILE = "prompts.jsonl"
MAX_LINE_BYTES = 2**20
ALL = "all"  # what tables call all domains together


class Prompt(NamedTuple):
    """One prompt and where it belongs."""

    id: str
    domain: str
    prompt: str


def load(path: str | os.PathLike | None = None) -> list[Prompt]:
    """Reads prompts, in the order of the file; None reads those of the library.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: a line is not an object with exactly these fields, is empty, or an id
        occurs twice; the message names file and line.
    """
    if path is None:
        resource = importlib.resources.files("dspark_jax.evaluation") / SHIPPED_FILE
        with importlib.resources.as_file(resource) as shipped:
            return load(shipped)
    prompts = []
    for where, values in _lines(path):
        unknown = sorted(set(values) - set(FIELDS))
        if unknown:
            raise ValueError(f"{where}: unknown key {unknown[0]!r}")
        prompts.append(Prompt(*(_text(where, values, name) for name in FIELDS)))
    return _checked(path, prompts)


def load_conversations(path: str | os.PathLike) -> list[Prompt]:
    """Reads the first user turn of every conversation of a JSON Lines file.

    A line is {"conversations": [{"role": …, "content": …}, …]}, other keys are left
    alone; `id` and `domain` are used where they are strings.

    Raises:
      FileNotFoundError, ValueError: as `load`; also for a conversation without a turn
        of the user.
    """
    prompts = []
    for number, (where, values) in enumerate(_lines(path)):
        turns = values.get("conversations")
        if not isinstance(turns, list) or not all(isinstance(t, dict) for t in turns):
            raise ValueError(f"{where}: 'conversations' must be a list of objects")
        first = next((turn for turn in turns if turn.get("role") == "user"), None)
        if first is None:
            raise ValueError(f"{where}: 'conversations' must hold a turn of the user")
        name, domain = values.get("id"), values.get("domain")
        prompts.append(
            Prompt(
                id=name if isinstance(name, str) and name else str(number),
                domain=domain if isinstance(domain, str) and domain else "text",
                prompt=_text(where, first, "content"),
            )
        )
    return _checked(path, prompts)


def in_turns(prompts: Sequence[Prompt], limit: int | None = None) -> list[Prompt]:
    """The domains in turn, at most `limit` prompts of each.

    The first n prompts are then spread over the domains, whatever n is.
    """
    by_domain: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_domain.setdefault(prompt.domain, []).append(prompt)
    columns = [members[:limit] for members in by_domain.values()]
    rows = itertools.zip_longest(*columns)
    return [prompt for row in rows for prompt in row if prompt is not None]


def encode(tokenizer: Any, prompts: Sequence[Prompt]) -> list[list[int]]:
    """Token ids, as a user's turn where the tokenizer has a chat template."""
    if tokenizer.chat is None:
        return [tokenizer.encode(prompt.prompt) for prompt in prompts]
    return [
        tokenizer.encode_chat([{"role": "user", "content": prompt.prompt}])
        for prompt in prompts
    ]


def _lines(path: str | os.PathLike) -> list[tuple[str, dict[str, Any]]]:
    path = pathlib.Path(path)
    found = []
    with open(path, "rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES), b"")):
            where = f"{path}, line {number + 1}"
            if len(line) == MAX_LINE_BYTES:
                raise ValueError(f"{where} has {MAX_LINE_BYTES} bytes or more")
            if not line.strip():
                continue
            try:
                values = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{where} is not valid JSON: {error}") from error
            if not isinstance(values, dict):
                raise ValueError(f"{where} must hold a JSON object, got {values!r:.60}")
            found.append((where, values))
    return found


def _text(where: str, values: dict[str, Any], name: str) -> str:
    value = values.get(name)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{where}: {name!r} must be a string with text in it")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{where}: {name!r} is not valid text: {error}") from error
    return value


def _checked(path: str | os.PathLike, prompts: list[Prompt]) -> list[Prompt]:
    if not prompts:
        raise ValueError(f"{path} holds no prompts")
    seen: set[str] = set()
    for prompt in prompts:
        if prompt.domain == ALL:
            raise ValueError(f"{path}: a domain must not be called {ALL!r}")
        if prompt.id in seen:
            raise ValueError(f"{path}: the id {prompt.id!r} occurs twice")
        seen.add(prompt.id)
    return prompts
