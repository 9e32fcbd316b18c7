"""Batches of rows by step, held-out rows and counts."""

import numpy as np
import pytest

from dspark_jax.training.runs import training_data
from dspark_jax.training.texts import corpus_files, corpus_writer, data


def make_rows(num_rows=27, length=6):
    tokens = np.arange(num_rows * length).reshape(num_rows, length).astype(np.uint16)
    return data.Rows(tokens=tokens, loss_mask=tokens % 3 > 0)


def of_rows(rows, **changes):
    settings = {"seed": 3, "batch_rows": 5, "held_out_rows": 5, "vocab_size": 200}
    return training_data.of_rows(rows, **settings | changes)


def test_every_epoch_is_a_permutation():
    found = of_rows(make_rows())
    firsts = [found.batches.at(step).tokens[:, 0] // 6 for step in range(8)]
    epochs = np.concatenate(firsts[:4]), np.concatenate(firsts[4:])
    for epoch in epochs:
        assert len(set(epoch.tolist())) == 20
        assert epoch.min() >= 5  # the held-out rows come first
    assert np.any(epochs[0] != epochs[1])
    np.testing.assert_array_equal(found.batches.at(2).tokens[:, 0] // 6, firsts[2])
    assert found.batches.at(0).tokens.dtype == np.int32


def test_the_permutation_is_made_once_an_epoch(monkeypatch):
    made = []
    make = np.random.default_rng

    def counted(seed):
        made.append(seed)
        return make(seed)

    found = of_rows(make_rows())
    monkeypatch.setattr(np.random, "default_rng", counted)
    for step in range(8):
        found.batches.at(step)
    assert made == [[3, 1, 0], [3, 1, 1]]


def test_counts_and_held_out_batches():
    rows = make_rows()
    rows.loss_mask[1] = False
    found = of_rows(rows, held_out_rows=10)
    assert len(found.held_out) == 2
    np.testing.assert_array_equal(found.held_out[1].tokens, rows.tokens[5:10])
    assert found.num_rows == 17
    assert found.counts == {
        "num_rows": 27,
        "num_held_out_rows": 10,
        "num_tokens": 162,
        "num_supervised_tokens": 104,
        "num_unsupervised_rows": 1,
    }


def test_frequent_tokens():
    counts = np.asarray([0, 3, 1, 0, 3, 2])
    assert training_data.frequent_tokens(counts) == [1, 4, 5, 2]
    assert training_data.frequent_tokens(counts, limit=2) == [1, 4]


def test_too_few_rows():
    with pytest.raises(ValueError, match="9 rows are too few for held_out_rows = 5"):
        of_rows(make_rows(9))
    with pytest.raises(ValueError, match="a batch of 5 rows needs as many rows, got 4"):
        training_data.RowBatches(make_rows(4), 0, 5)


@pytest.fixture(name="corpus")
def _corpus(tmp_path):
    rng = np.random.default_rng(0)
    buckets = [
        data.Rows(
            tokens=rng.integers(120, size=(num_rows, length)).astype(np.uint16),
            loss_mask=np.ones((num_rows, length), np.bool_),
        )
        for length, num_rows in ((20, 40), (42, 30))
    ]
    counts = {"dropped": {"too_short": 3}, "settings": {"seed": 1}, "is_ok": True}
    corpus_writer.save_corpus(tmp_path / "c", buckets, vocab_size=128, counts=counts)
    return corpus_files.load_corpus(tmp_path / "c")


def test_a_corpus_of_two_lengths(corpus):
    found = training_data.of_corpus(corpus, seed=1, batch_rows=4, held_out_rows=16)
    assert found.num_rows == 54
    shapes = {found.batches.at(step).tokens.shape for step in range(10)}
    assert shapes == {(8, 20), (4, 42)}
    assert {batch.tokens.shape for batch in found.held_out} == {(4, 20), (4, 42)}
    trained = {tuple(row) for s in range(9) for row in found.batches.at(s).tokens}
    held = {tuple(row) for batch in found.held_out for row in batch.tokens}
    assert not trained & held
    assert found.token_counts.sum() + sum(b.tokens.size for b in found.held_out) <= (
        corpus.num_tokens
    )
    assert found.counts == {
        "num_rows": 70,
        "num_held_out_rows": 16,
        "num_tokens": 2060,
        "dropped.too_short": 3,
    }


def test_a_corpus_with_too_few_held_out_rows(corpus):
    with pytest.raises(ValueError, match="leaves no batch of 4 rows; hold out more"):
        training_data.of_corpus(corpus, seed=1, batch_rows=4, held_out_rows=4)
