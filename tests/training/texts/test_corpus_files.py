"""Corpus folders: what is written is read, in parts, and nothing damaged is."""

import json

import numpy as np
import pytest

from dspark_jax.training.texts import corpus_files, corpus_writer
from dspark_jax.training.texts.data import Rows


def make_rows(num_rows, length, vocab_size=50, seed=0):
    rng = np.random.default_rng([seed, num_rows, length])
    tokens = rng.integers(0, vocab_size, (num_rows, length)).astype(np.int32)
    return Rows(tokens=tokens, loss_mask=rng.random((num_rows, length)) < 0.4)


BUCKETS = [make_rows(5, 12), make_rows(7, 31)]


@pytest.fixture
def folder(tmp_path):
    corpus_writer.save_corpus(
        tmp_path / "corpus",
        BUCKETS,
        vocab_size=50,
        fingerprint="abc",
        seed=3,
        counts={"num_records": 12},
    )
    return tmp_path / "corpus"


def test_what_is_saved_is_loaded(folder):
    corpus = corpus_files.load_corpus(folder, vocab_size=50, fingerprint="abc")
    assert (corpus.seed, corpus.target_fingerprint) == (3, "abc")
    assert corpus.counts == {"num_records": 12}
    assert (corpus.num_rows, corpus.num_tokens) == (12, 5 * 12 + 7 * 31)
    for bucket, rows in zip(corpus.buckets, BUCKETS, strict=True):
        assert isinstance(bucket.tokens, np.memmap)
        assert bucket.tokens.dtype == np.uint16
        taken = bucket.take(np.asarray([4, 0, 2]))
        assert taken.tokens.dtype == np.int32
        np.testing.assert_array_equal(taken.tokens, rows.tokens[[4, 0, 2]])
        np.testing.assert_array_equal(taken.loss_mask, rows.loss_mask[[4, 0, 2]])
        one = bucket.take(1)
        np.testing.assert_array_equal(one.loss_mask, rows.loss_mask[1])
    # The files are plain arrays for everybody else.
    np.testing.assert_array_equal(
        np.load(folder / "tokens_31.npy", allow_pickle=False), BUCKETS[1].tokens
    )


def test_large_vocabularies_take_32_bits(tmp_path):
    rows = make_rows(3, 8, 70_000)
    corpus_writer.save_corpus(tmp_path, [rows], vocab_size=70_000)
    (bucket,) = corpus_files.load_corpus(tmp_path).buckets
    assert bucket.tokens.dtype == np.int32
    np.testing.assert_array_equal(bucket.take(slice(None)).tokens, rows.tokens)


def test_split_sets_rows_of_every_length_aside(folder):
    corpus = corpus_files.load_corpus(folder)
    held, rest = corpus_files.split(corpus, 5, seed=1)
    assert [bucket.num_rows for bucket in held.buckets] == [2, 3]
    assert [bucket.num_rows for bucket in rest.buckets] == [3, 4]
    for bucket, mine, others in zip(
        corpus.buckets, held.buckets, rest.buckets, strict=True
    ):
        parts = [part.take(slice(None)).tokens for part in (mine, others)]
        together = {row.tobytes() for part in parts for row in part}
        assert together == {row.tobytes() for row in bucket.take(slice(None)).tokens}
    again, _ = corpus_files.split(corpus, 5, seed=1)
    np.testing.assert_array_equal(again.buckets[1].index, held.buckets[1].index)
    first, _ = corpus_files.split(rest, 2)  # a view of a view
    chosen = {row.tobytes() for row in first.buckets[0].take(slice(None)).tokens}
    assert chosen <= {row.tobytes() for row in rest.buckets[0].take(slice(None)).tokens}
    with pytest.raises(ValueError, match=r"`num_rows` must lie in 1\.\.11, got 12"):
        corpus_files.split(corpus, 12)


def test_token_counts_are_of_supervised_tokens(folder):
    found = corpus_files.token_counts(corpus_files.load_corpus(folder))
    expected = np.zeros(50, np.int64)
    for rows in BUCKETS:
        np.add.at(expected, rows.tokens[rows.loss_mask], 1)
    np.testing.assert_array_equal(found, expected)


def change(**fields):
    def damage(folder):
        path = folder / "corpus.json"
        about = json.loads(path.read_text()) | fields
        path.write_text(json.dumps({k: v for k, v in about.items() if v != "absent"}))

    return damage


def bucket(**fields):
    return change(buckets=[{"length": 12, "num_rows": 5} | fields])


def rewrite(name, make):
    return lambda folder: (folder / name).write_bytes(make(folder / name))


def save(array, **options):
    def damage(folder):
        with (folder / "tokens_12.npy").open("wb") as file:
            np.lib.format.write_array(file, array, **options)

    return damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (change(version=2), "version must be 1, got 2"),
        (change(seed="absent"), "must have the keys buckets, counts, seed,"),
        (change(more=1), "must have the keys"),
        (change(target_fingerprint=5), "target_fingerprint must be text"),
        (change(vocab_size=True), r"vocab_size must be an integer in 1\.\.2147483647"),
        (change(seed=-1), "seed must be an integer in 0"),
        (change(counts=[]), "counts must be an object"),
        (change(buckets={}), "buckets must be a list"),
        (change(buckets=[{"length": 12}]), "must have the keys length and num_rows"),
        (bucket(length=0), "length must be an integer in 1..1048576, got 0"),
        (bucket(num_rows=2**60), "num_rows must be an integer in 1"),
        (bucket(num_rows=6), r"tokens_12.npy must hold \(6, 12\) uint16 or int32"),
        (
            change(buckets=[{"length": n, "num_rows": 5} for n in (31, 12)]),
            r"lengths must increase, got \[31, 12\]",
        ),
        (change(vocab_size=40), r"tokens_12.npy must hold ids in 0\.\.39, got 4"),
        (rewrite("corpus.json", lambda p: b"{"), "is not valid JSON"),
        (rewrite("corpus.json", lambda p: b"[]"), "must hold a JSON object"),
        (rewrite("tokens_12.npy", lambda p: b""), "is not a valid .npy file"),
        (rewrite("tokens_12.npy", lambda p: b"\x93NUMPY\x02\x00"), "instead of"),
        (
            rewrite("tokens_12.npy", lambda p: p.read_bytes().replace(b"{", b"(")),
            "is not a valid .npy file",
        ),
        (
            rewrite("loss_mask_31.npy", lambda p: p.read_bytes()[:-1]),
            "loss_mask_31.npy is truncated",
        ),
        (save(np.zeros((5, 12), np.int64)), r"got \(5, 12\) int64"),
        (save(np.zeros((5, 12), np.uint16, order="F")), "by columns"),
        (save(np.zeros((5, 11), np.uint16)), r"got \(5, 11\) uint16"),
        (
            save(np.full((5, 12), None), allow_pickle=True),
            r"got \(5, 12\) object",
        ),
        (save(np.full((5, 12), -1, np.int32)), r"ids in 0\.\.49, got -1"),
    ],
)
def test_damaged_folders_are_refused(folder, damage, message):
    damage(folder)
    with pytest.raises(ValueError, match=message):
        corpus_files.load_corpus(folder)


def test_another_target_is_refused(folder):
    with pytest.raises(ValueError, match="for a vocabulary of 50 tokens, the target"):
        corpus_files.load_corpus(folder, vocab_size=51)
    with pytest.raises(ValueError, match="another target: fingerprint abc, the target"):
        corpus_files.load_corpus(folder, fingerprint="other")


def test_missing_files_are_named(folder, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"it has no corpus\.json"):
        corpus_files.load_corpus(tmp_path)
    (folder / "loss_mask_12.npy").unlink()
    with pytest.raises(FileNotFoundError, match=r"loss_mask_12\.npy is missing"):
        corpus_files.load_corpus(folder)
