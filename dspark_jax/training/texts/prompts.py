"""Prompts for training texts: written for this project, filled with random details.

A template is text with slots like `{name}` or `{small2}`: the word picks a list of
`prompts.toml`, a trailing digit tells two draws apart, and one slot has one value in a
prompt. Code prompts use the documentation of Python's standard library, read at run
time. No evaluation set was used for any of it.
"""

import functools
import importlib
import inspect
import pathlib
import re
import tomllib
from collections.abc import Sequence
from typing import Any

import numpy as np

BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
FILE = "prompts.toml"
DOMAINS = ("maths", "code", "instruction")


@functools.cache
def texts() -> dict[str, Any]:
    """Templates, openings and word lists, as `prompts.toml` has them."""
    path = pathlib.Path(__file__).with_name(FILE)
    return tomllib.loads(path.read_text(encoding="utf-8"))


def make_prompts(rng: np.random.Generator, count: int) -> list[tuple[str, str]]:
    """`count` (domain, text): 40 % maths, 30 % code, 30 % instructions."""
    documented = documented_functions()
    makers = (_word_problem, _code, _instruction)
    kinds = rng.choice(len(makers), size=count, p=(0.4, 0.3, 0.3))
    return [(DOMAINS[kind], makers[kind](rng, documented)) for kind in kinds]


@functools.cache
def documented_functions() -> tuple[tuple[str, str, str], ...]:
    """(name, signature, docstring) of the standard library's documented functions."""
    found: dict[str, tuple[str, str, str]] = {}
    for module_name in texts()["modules"]:
        members = vars(importlib.import_module(module_name))
        classes = [value for value in members.values() if inspect.isclass(value)]
        for space in (members, *(vars(found_class) for found_class in classes)):
            for name, value in list(space.items()):
                if name.startswith("_") or not inspect.isroutine(value):
                    continue
                doc = inspect.getdoc(value) or ""
                try:
                    signature = str(inspect.signature(value))
                except (TypeError, ValueError):  # some builtins have none
                    continue
                # Defaults that print an address would differ from run to run.
                plain = len(signature) < 90 and " at 0x" not in signature
                if 40 <= len(doc) <= 420 and plain:
                    found.setdefault(doc, (name, signature, doc))
    return tuple(found[doc] for doc in sorted(found))


def fill(rng: np.random.Generator, template: str) -> str:
    """Replaces every slot of a template by a random value."""
    values: dict[str, str] = {}

    def replace(match: re.Match) -> str:
        slot = match[1]
        if slot not in values:
            values[slot] = _draw(rng, slot.rstrip("0123456789"), set(values.values()))
        return values[slot]

    return re.sub(r"\{(\w+)\}", replace, template)


def _draw(rng: np.random.Generator, kind: str, used: set[str]) -> str:
    if kind in texts()["ranges"]:
        low, high = texts()["ranges"][kind]
        return str(rng.integers(low, high + 1))
    choices = texts()["words"][kind]
    for _ in range(8):  # two names in one prompt should differ
        value = str(choices[rng.integers(len(choices))])
        if value not in used:
            break
    return value


def _pick(rng: np.random.Generator, choices: Sequence) -> Any:
    return choices[int(rng.integers(len(choices)))]


def _word_problem(rng: np.random.Generator, documented: Sequence) -> str:
    del documented
    text = fill(rng, _pick(rng, texts()["word_problems"]))
    return text + BOXED if rng.random() < 0.5 else text


def _code(rng: np.random.Generator, documented: Sequence) -> str:
    if rng.random() < 0.4:
        return fill(rng, _pick(rng, texts()["code"]))
    name, signature, doc = _pick(rng, documented)
    indented = "\n    ".join(doc.splitlines())
    code = f'def {name}{signature}:\n    """{indented}\n    """\n'
    template = _pick(rng, texts()["documented"])
    values = {"function": name, "doc": doc, "code": code}
    # In one pass: the docstring may hold braces itself.
    return re.sub(r"\{(function|doc|code)\}", lambda m: values[m[1]], template)


def _instruction(rng: np.random.Generator, documented: Sequence) -> str:
    del documented
    return fill(rng, _pick(rng, texts()["instructions"]))
