"""Prompts: the library's own, files, and conversations."""

import collections
import json

import pytest

from dspark_jax.evaluation import prompts
from dspark_jax.evaluation.prompts import Prompt


def lines(path, *values):
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path


def one(name, domain="x", prompt="hi"):
    return {"id": name, "domain": domain, "prompt": prompt}


def test_the_library_s_own():
    found = prompts.load()
    counts = collections.Counter(prompt.domain for prompt in found)
    assert counts == dict.fromkeys(("maths", "chat", "code", "instruction"), 6)
    assert max(len(prompt.prompt) for prompt in found) < 400


def test_a_file(tmp_path):
    path = lines(tmp_path / "p.jsonl", one("a"), one("b", "y", "two\nlines"))
    path.write_text(path.read_text() + "\n \n")
    assert prompts.load(path) == [
        Prompt("a", "x", "hi"),
        Prompt("b", "y", "two\nlines"),
    ]


def test_domains_in_turn():
    given = [Prompt(n, d, "-") for n, d in (*zip("abcd", "xxxy", strict=True),)]
    found = prompts.in_turns(given)
    assert [prompt.id for prompt in found] == ["a", "d", "b", "c"]
    assert [prompt.id for prompt in prompts.in_turns(given, 1)] == ["a", "d"]


def test_conversations(tmp_path):
    turns = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "answer"},
        {"role": "user", "content": "second"},
    ]
    path = lines(
        tmp_path / "c.jsonl",
        {"id": "a", "conversations": turns, "status": "success"},
        {"conversations": turns[1:], "domain": "code"},
    )
    assert prompts.load_conversations(path) == [
        Prompt("a", "text", "first"),
        Prompt("1", "code", "first"),
    ]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([], "holds no prompts"),
        ([[1]], "line 1 must hold a JSON object"),
        ([one("a"), {**one("b"), "x": 1}], "line 2: unknown key 'x'"),
        ([{"id": "a", "domain": "x"}], "line 1: 'prompt' must be a string with text"),
        ([one("a", prompt=" ")], "line 1: 'prompt' must be a string with text"),
        ([one("a", prompt=3)], "line 1: 'prompt' must be a string with text"),
        ([one(3)], "line 1: 'id' must be a string with text"),
        ([one("a", prompt="\ud800")], "line 1: 'prompt' is not valid text"),
        ([one("a"), one("a")], "the id 'a' occurs twice"),
        ([one("a", "all")], "a domain must not be called 'all'"),
    ],
)
def test_bad_files(tmp_path, values, message):
    with pytest.raises(ValueError, match=message):
        prompts.load(lines(tmp_path / "p.jsonl", *values))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"id": "a"}, "line 1: 'conversations' must be a list of objects"),
        ({"conversations": ["hi"]}, "'conversations' must be a list of objects"),
        ({"conversations": []}, "'conversations' must hold a turn of the user"),
        ({"conversations": [{"role": "user"}]}, "'content' must be a string"),
    ],
)
def test_bad_conversations(tmp_path, value, message):
    with pytest.raises(ValueError, match=message):
        prompts.load_conversations(lines(tmp_path / "c.jsonl", value))


def test_damaged_lines(tmp_path, monkeypatch):
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"id": "a", "domain": "x", "prompt": "\xff"}\n')
    with pytest.raises(ValueError, match="line 1 is not valid JSON"):
        prompts.load(path)
    path.write_text("[" * 10_000)
    with pytest.raises(ValueError, match="line 1 is not valid JSON"):
        prompts.load(path)
    monkeypatch.setattr(prompts, "MAX_LINE_BYTES", 100)
    with pytest.raises(ValueError, match="line 1 has 100 bytes or more"):
        prompts.load(path)
    with pytest.raises(FileNotFoundError, match=r"none\.jsonl"):
        prompts.load(tmp_path / "none.jsonl")
