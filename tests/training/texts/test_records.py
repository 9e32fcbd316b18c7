"""JSONL files of conversations: what is read, and every way of being wrong."""

import json

import pytest

from dspark_jax.training.texts import records

CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


def write(tmp_path, *lines):
    path = tmp_path / "chats.jsonl"
    parts = [x if isinstance(x, bytes) else json.dumps(x).encode() for x in lines]
    path.write_bytes(b"\n".join(parts) + b"\n")
    return path


def test_records_are_read(tmp_path):
    path = write(
        tmp_path,
        {"id": "x", "conversations": CHAT, "status": "success", "other": [1]},
        b"",
        {"id": 7, "messages": CHAT},
        {"turns": ["a", "c"]},
        {"prompt": "a", "status": "error"},
    )
    found = list(records.read(path))
    assert [record.name for record in found] == ["x", "7", "4", "5"]
    assert found[0].messages == found[1].messages == tuple(CHAT)
    assert [m["role"] for m in found[2].messages] == ["user", "user"]
    assert found[3].messages == ({"role": "user", "content": "a"},)
    assert [record.status for record in found] == ["success"] * 3 + ["error"]
    assert found[1].where == f"{path}:3"


BAD = [
    (b"{", "not valid JSON: "),
    (b"[" * 100_000, "not valid JSON: nested too deeply"),
    (b"\xff{}", "not valid JSON: "),
    (b"[]", "a record must be an object, got list"),
    ({"conversations": CHAT, "id": None}, "'id' must be text or an integer, got None"),
    ({"conversations": CHAT, "id": True}, "'id' must be text or an integer, got True"),
    ({"conversations": CHAT, "status": 1}, "'status' must be text, got 1"),
    ({"text": "a"}, r"a record must have one of 'conversations', .* got \['text'\]"),
    ({"prompt": "a", "turns": ["b"]}, r".* got \['turns', 'prompt'\]"),
    ({"conversations": []}, "'conversations' must be a non-empty list"),
    ({"messages": "a"}, "'messages' must be a non-empty list"),
    ({"turns": [1]}, "message 0: content must be text, got 1"),
    ({"messages": [{"role": "user"}]}, "message 0 must have the keys 'role' and"),
    ({"messages": ["a"]}, "message 0 must have the keys 'role' and 'content', got 'a'"),
    (
        {"messages": [*CHAT, {"role": "human", "content": ""}]},
        r"message 2: role must be one of \('system', .*\), got 'human'",
    ),
    (
        {"messages": [{"role": "user", "content": None}]},
        "message 0: content must be text, got None",
    ),
    (
        {"messages": [*CHAT, {"role": "system", "content": ""}]},
        "message 2: only the first one may be the system's",
    ),
    (
        {"messages": [{"role": "user", "content": "\ud800"}]},
        "message 0: content is not valid Unicode",
    ),
]


@pytest.mark.parametrize(("line", "message"), BAD)
def test_bad_lines_are_named(tmp_path, line, message):
    path = write(tmp_path, {"messages": CHAT}, line)
    with pytest.raises(ValueError, match=rf"chats\.jsonl:2: {message}"):
        list(records.read(path))


def test_bad_lines_can_be_handed_out(tmp_path):
    path = write(tmp_path, *(line for line, _ in BAD), {"id": "z", "messages": CHAT})
    found = list(records.read(path, is_lenient=True))
    assert len(found) == len(BAD) + 1
    assert all(record.error and not record.messages for record in found[:-1])
    assert found[-1].messages == tuple(CHAT)
    assert not found[-1].error


def test_a_line_has_an_end(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "MAX_LINE", 100)
    path = write(tmp_path, b'{"prompt": "' + b"a" * 1000 + b'"}', {"prompt": "b"})
    with pytest.raises(ValueError, match=":1: a line has at most 100 bytes"):
        list(records.read(path))
    found = list(records.read(path, is_lenient=True))
    assert [bool(record.error) for record in found] == [True, False]


def test_writer_appends_and_cuts(tmp_path):
    path = tmp_path / "out.jsonl"
    with records.RecordWriter(path) as writer:
        for name in "abc":
            writer.write({"id": name, "prompt": "é"})
        writer.sync()
        assert len(list(records.read(path))) == 3
    with path.open("ab") as file:
        file.write(b'{"id": "half')
    with records.RecordWriter(path, 2) as writer:
        writer.write({"id": "d", "prompt": "x"})
    assert [record.name for record in records.read(path)] == ["a", "b", "d"]
    with pytest.raises(ValueError, match="must have 4 records to go on, it has 3"):
        records.RecordWriter(path, 4)
