"""Appending to a corpus: commits, crashes between them, and going on."""

import dataclasses
import json
from typing import Any

import numpy as np
import pytest

from dspark_jax.training.texts import corpus_files, corpus_writer
from dspark_jax.training.texts.data import Rows


@dataclasses.dataclass
class Counts:
    num_rows: int = 0
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)


def open_writer(folder, **options):
    return corpus_writer.CorpusWriter(folder, vocab_size=100, **options)


def rows(value, num_rows=3, length=10):
    tokens = np.full((num_rows, length), value)
    return tokens, tokens > 50


def read(folder):
    corpus = corpus_files.load_corpus(folder)
    return {b.length: b.take(slice(None)).tokens[:, 0].tolist() for b in corpus.buckets}


def test_commits_grow_the_corpus(tmp_path):
    with open_writer(tmp_path) as writer:
        writer.add(*rows(1))
        writer.commit({"num_rows": 3})
        assert read(tmp_path) == {10: [1, 1, 1]}
        writer.add(*rows(60, num_rows=1))
        writer.add(*rows(3, num_rows=2, length=4), length=6)
        assert read(tmp_path) == {10: [1, 1, 1]}  # not committed yet
        writer.commit({"num_rows": 6})
    assert read(tmp_path) == {6: [3, 3], 10: [1, 1, 1, 60]}
    padded = corpus_files.load_corpus(tmp_path).buckets[0].take(0)
    assert padded.tokens.tolist() == [3, 3, 3, 3, 0, 0]
    corpus = corpus_files.load_corpus(tmp_path)
    assert corpus.buckets[1].take(3).loss_mask.all()
    assert corpus.counts == {"num_rows": 6}


def test_a_crash_loses_what_was_not_committed(tmp_path):
    with open_writer(tmp_path, seed=1) as writer:
        writer.add(*rows(1))
        writer.commit({})
        committed = (tmp_path / "corpus.json").read_bytes()
        writer.add(*rows(2))
        writer.commit({})
        writer.add(*rows(3, length=7))
    # As if the machine had stopped after the second commit's arrays.
    (tmp_path / "corpus.json").write_bytes(committed)
    assert read(tmp_path) == {10: [1, 1, 1]}
    with open_writer(tmp_path, seed=1, resume=True) as writer:
        writer.add(*rows(4))
        writer.add(*rows(5, length=7))
        writer.commit({})
    assert read(tmp_path) == {7: [5, 5, 5], 10: [1, 1, 1, 4, 4, 4]}


def test_going_on_before_the_first_commit_begins_anew(tmp_path):
    with open_writer(tmp_path) as writer:
        writer.add(*rows(1))
    with open_writer(tmp_path, resume=True) as writer:
        writer.add(*rows(2))
        writer.commit({})
    assert read(tmp_path) == {10: [2, 2, 2]}


def test_only_the_same_corpus_is_continued(tmp_path):
    with open_writer(tmp_path, seed=1) as writer:
        writer.commit({})
    with pytest.raises(FileExistsError, match="give another folder"):
        open_writer(tmp_path, seed=1)
    with pytest.raises(ValueError, match="cannot be continued: its seed is 1, not 2"):
        open_writer(tmp_path, seed=2, resume=True)
    with pytest.raises(ValueError, match="its target_fingerprint is '', not 'x'"):
        open_writer(tmp_path, seed=1, fingerprint="x", resume=True)


def test_progress_knows_its_settings(tmp_path):
    with open_writer(tmp_path) as writer:
        counts = writer.progress({"sizes": (1, 2)}, Counts())
        assert counts == Counts(0, {"sizes": [1, 2]})
        counts.num_rows = 3
        writer.add(*rows(1))
        writer.commit(dataclasses.asdict(counts))
    with open_writer(tmp_path, resume=True) as writer:
        assert writer.progress({"sizes": (1, 2)}, Counts()).num_rows == 3
        with pytest.raises(ValueError, match=r"made with sizes \[1, 2\], not \[1, 3\]"):
            writer.progress({"sizes": (1, 3)}, Counts())
    about = json.loads((tmp_path / "corpus.json").read_text())
    (tmp_path / "corpus.json").write_text(json.dumps(about | {"counts": {"a": 1}}))
    with (
        open_writer(tmp_path, resume=True) as writer,
        pytest.raises(ValueError, match="another command has made it"),
    ):
        writer.progress({}, Counts())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((np.zeros(3), np.zeros(3)), r"one shape \(N, S\), got \(3,\) and \(3,\)"),
        ((np.zeros((2, 3)), np.zeros((2, 4))), r"got \(2, 3\) and \(2, 4\)"),
        ((*rows(1), 9), r"`length` must lie in 10\.\.1048576, got 9"),
        (rows(100), r"`tokens` must hold ids in 0\.\.99, got 100"),
        (rows(-1), r"`tokens` must hold ids in 0\.\.99, got -1"),
    ],
)
def test_bad_rows_are_refused(tmp_path, arguments, message):
    with open_writer(tmp_path) as writer, pytest.raises(ValueError, match=message):
        writer.add(*arguments)


def test_two_buckets_of_one_length_are_refused(tmp_path):
    tokens, mask = rows(1)
    one = Rows(tokens=tokens, loss_mask=mask)
    with pytest.raises(ValueError, match=r"distinct lengths, got \[10, 10\]"):
        corpus_writer.save_corpus(tmp_path, [one, one], vocab_size=100)
