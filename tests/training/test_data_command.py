"""`dspark data`: its four subcommands on a tiny target, and how they say no."""

import contextlib
import json

import numpy as np
import pytest

from dspark_jax import cli
from dspark_jax.commands import terminal
from dspark_jax.targets import fetch
from dspark_jax.training.texts import corpus_files, corpus_writer

pytestmark = pytest.mark.usefixtures("quick_compilation")


def run(capsys, *arguments):
    status = cli.main(["data", *(str(a) for a in arguments)])
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return status, out, err


def run_json(capsys, *arguments):
    status, out, _ = run(capsys, *arguments, "--json")
    assert status == 0
    return json.loads(out.splitlines()[-1])


def synthesize(chat_target, folder):
    return [
        "synthesize", folder, "--target", chat_target.folder, "--length", 96,
        "--max-prompt", 60, "--batch-rows", 4, "--min-loss-tokens", 4,
        "--temperatures", 1.0,
    ]  # fmt: skip


def test_synthesize_and_show(capsys, chat_target, tmp_path):
    folder = tmp_path / "corpus"
    arguments = synthesize(chat_target, folder)
    report = run_json(capsys, *arguments, "--seconds", 1e-3)
    assert report["num_batches"] == 1
    assert report["num_written"] == 4
    assert not report["is_interrupted"]
    assert report["out"] == str(folder)
    status, _, err = run(capsys, *arguments, "--seconds", 1e-3)
    assert (status, err.splitlines()[-1]) == (
        2,
        f"dspark data: error: {folder}/corpus.json is there already: give another "
        "folder or --resume",
    )
    more = run_json(capsys, *arguments, "--seconds", 1e-3, "--resume")
    assert more["num_batches"] == 2
    shown = run_json(
        capsys, "show", folder, "--target", chat_target.folder, "--rows", 2
    )
    assert shown["num_rows"] == more["num_rows"]
    assert len(shown["rows"]) == min(2, more["num_rows"])
    assert all("⟦" in row["text"] for row in shown["rows"])
    status, out, _ = run(capsys, "show", folder, "--target", chat_target.folder)
    assert status == 0
    assert "--- row" in out


def test_ctrl_c_leaves_a_corpus(capsys, monkeypatch, chat_target, tmp_path):
    always = contextlib.nullcontext(lambda: True)
    monkeypatch.setattr(terminal, "interruptible", lambda: always)
    arguments = synthesize(chat_target, tmp_path)
    status, out, err = run(capsys, *arguments, "--seconds", 1e6, "--json")
    assert status == 130
    report = json.loads(out)
    assert (report["is_interrupted"], report["num_batches"]) == (True, 1)
    assert "4 rows written in 1 batches" in err
    assert corpus_files.load_corpus(tmp_path).num_rows == report["num_rows"]


def test_own_prompts_are_used(capsys, chat_target, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "Sing."}\n{"turns": ["Dance.", "More."]}\n')
    arguments = synthesize(chat_target, tmp_path / "corpus")
    report = run_json(
        capsys, *arguments, "--seconds", 1e-3, "--prompts", prompts, "--same-prompt", 9
    )
    assert set(report["domains"]) <= {"own"}
    found = (tmp_path / "corpus" / "conversations.jsonl").read_text().splitlines()
    asked = {json.loads(line)["conversations"][0]["content"] for line in found}
    assert asked
    assert asked <= {"Sing.", "Dance."}


def test_regenerate_then_tokenize(capsys, chat_target, tmp_path, golden):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"id": "a", "prompt": "Sing."}\nnonsense\n')
    arguments = [
        "regenerate", prompts, tmp_path / "a", "--target", chat_target.folder,
        "--max-new-tokens", 10, "--max-length", 64, "--batch-rows", 2,
        "--min-loss-tokens", 1, "--temperature", 0,
    ]  # fmt: skip
    status, _, err = run(capsys, *arguments)
    assert (status, len(err.strip().splitlines())) == (2, 1)
    assert "prompts.jsonl:2: not valid JSON" in err
    drafter = golden / "cases" / "dspark_vanilla_b4" / "drafter"
    report = run_json(
        capsys, *arguments, "--skip-bad", "--resume", "--drafter", drafter
    )
    assert (report["num_records"], report["num_rows"]) == (1, 1)
    exact = corpus_files.load_corpus(tmp_path / "a").buckets[0].take(0)
    chats = tmp_path / "a" / "conversations.jsonl"
    report = run_json(
        capsys, "tokenize", chats, tmp_path / "b", "--target", chat_target.folder,
        "--max-length", 64, "--min-loss-tokens", 1,
    )  # fmt: skip
    assert (report["num_records"], report["num_rows"]) == (1, 1)
    text = corpus_files.load_corpus(
        tmp_path / "b", fingerprint=chat_target.target.config.fingerprint
    )
    # The exact row ends where the answer was cut; the text's row closes the turn.
    cut = int(np.flatnonzero(exact.loss_mask)[-1])
    np.testing.assert_array_equal(
        text.buckets[0].take(0).tokens[: cut - 2], exact.tokens[: cut - 2]
    )


def test_tokenize_reports_drops(capsys, chat_target, tmp_path):
    chats = tmp_path / "chats.jsonl"
    chat = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b" * 30},
    ]
    lines = [{"conversations": chat}, {"conversations": chat[:1]}]
    chats.write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = ["tokenize", chats, tmp_path / "out", "--target", chat_target.folder]
    status, out, err = run(capsys, *arguments, "--lengths", 100, "--max-length", 100)
    assert (status, out) == (0, "")
    assert "2 records read, 1 rows kept, 0 of them truncated" in err
    assert "1 records dropped: 0 malformed, 0 marked as failed, 1 without" in err


BAD = [
    (["synthesize", "out", "--tokens", "0"], "--tokens must be at least 1, got 0.0"),
    (["synthesize", "out", "--seconds", "-1"], "--seconds must be a number > 0, got"),
    (["synthesize", "out", "--max-repeated", "2"], "--max-repeated must be in [0, 1]"),
    (["synthesize", "out", "--same-prompt", "0"], "--same-prompt must be at least 1"),
    (["synthesize", "out", "--length", "1"], "--length must be at least 2, got 1"),
    (["synthesize", "out", "--seed", "-1"], "--seed must be in 0..2^32-1, got -1"),
    (
        ["synthesize", "out", "--temperatures", "1", "-2"],
        "--temperatures must be >= 0, got -2.0",
    ),
    (["synthesize", "out", "--prompts", "none.jsonl"], "no such file: none.jsonl"),
    (["regenerate", "none.jsonl", "out"], "no such file: none.jsonl"),
    (["regenerate", "x", "out", "--top-p", "0"], "--top-p must be in (0, 1], got 0.0"),
    (
        ["regenerate", "x", "out", "--temperature", "0", "--top-k", "5"],
        "--top-k needs --temperature above 0",
    ),
    (["tokenize", "none.jsonl", "out"], "no such file: none.jsonl"),
    (["join", "out", "none"], "`sources` must name two corpora or more, got 1"),
    (["tokenize", "x", "out", "--max-length", "1"], "--max-length must be in 2..2^20"),
    (["show", "nothing"], "nothing is not a corpus folder: it has no corpus.json"),
    (["show", "nothing", "--rows", "-1"], "--rows must be at least 0, got -1"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_bad_input_is_one_line(capsys, monkeypatch, tmp_path, arguments, message):
    monkeypatch.chdir(tmp_path)
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (2, "")
    assert err.startswith(f"dspark data: error: {message}")
    assert err.count("\n") == 1


def test_another_tokenizer_is_refused(capsys, chat_target, tmp_path):
    with corpus_writer.CorpusWriter(tmp_path / "corpus", vocab_size=50) as writer:
        writer.add(np.ones((1, 8), np.int32), np.ones((1, 8), np.bool_))
        writer.commit({})
    status, _, err = run(
        capsys, "show", tmp_path / "corpus", "--target", chat_target.folder
    )
    assert status == 2
    assert "was made for a vocabulary of 50 tokens, the tokenizer of" in err


@pytest.mark.parametrize(
    "name", ["", "synthesize", "regenerate", "tokenize", "join", "show"]
)
def test_help_has_examples(capsys, name):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["data", *([name] if name else []), "--help"])
    out = capsys.readouterr().out
    assert f"dspark data {name}" in out
    assert "examples:" in out


@pytest.mark.slow
def test_the_real_target_writes(capsys, tmp_path):
    if not (fetch.cache_dir() / fetch.FILE_NAME).is_file():
        pytest.skip("the default target is not in the cache")
    arguments = ["synthesize", tmp_path, "--length", 96, "--max-prompt", 48]
    report = run_json(
        capsys, *arguments, "--batch-rows", 4, "--seconds", 1, "--min-loss-tokens", 4
    )
    assert report["num_rows"] >= 1
    shown = run_json(capsys, "show", tmp_path, "--rows", 4)
    for row in shown["rows"]:
        assert "named SmolLM, trained by Hugging Face<|im_end|>" in row["text"]
        assert "⟦" in row["text"]
