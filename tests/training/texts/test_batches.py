"""Batches by step number: epochs, shares of lengths, resuming, pinned order."""

import numpy as np
import pytest

from dspark_jax.training.texts import batches, corpus_files, corpus_writer
from dspark_jax.training.texts.data import Rows

ORDER = [2, 2, 2, 1, 2, 2, 2, 2, 1, 1, 2, 1]
FIRST = (2, [9, 7, 37, 26])
SIZES = ((3, 8), (100, 16), (41, 32))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus") / "rows"
    parts, number = [], 1
    for num_rows, length in SIZES:
        tokens = np.zeros((num_rows, length), np.int32)
        tokens[:, 0] = np.arange(number, number + num_rows)  # names the row
        number += num_rows
        parts.append(Rows(tokens=tokens, loss_mask=tokens > 0))
    corpus_writer.save_corpus(folder, parts, vocab_size=200)
    return corpus_files.load_corpus(folder)


def test_a_batch_has_rows_of_one_length(corpus):
    found = batches.Batches(corpus, 0, 4)
    assert found.shapes == ((16, 8), (8, 16), (4, 32))  # 128 tokens each
    for step in range(40):
        batch = found.at(step)
        assert batch.tokens.shape in found.shapes
        assert batch.tokens.dtype == np.int32
        assert batch.loss_mask.dtype == np.bool_
        np.testing.assert_array_equal(batch.loss_mask, batch.tokens > 0)


def test_every_row_comes_once_an_epoch(corpus):
    found = batches.Batches(corpus, 5, 4)
    rows = {length: [] for _, length in SIZES}
    for step in range(40 * found.num_batches_per_epoch):
        tokens = found.at(step).tokens
        rows[tokens.shape[1]] += tokens[:, 0].tolist()
    for num_rows, length in SIZES:
        epochs = len(rows[length]) // num_rows
        assert epochs >= 30
        seen = [rows[length][e * num_rows : (e + 1) * num_rows] for e in range(epochs)]
        assert all(len(set(epoch)) == num_rows for epoch in seen)
        assert seen[0] != seen[1] or num_rows == 3


def test_lengths_come_in_proportion_to_their_tokens(corpus):
    found = batches.Batches(corpus, 1, 4)
    steps = 40 * found.num_batches_per_epoch
    counts = np.bincount([found.rows_at(step)[0] for step in range(steps)])
    tokens = np.asarray([num_rows * length for num_rows, length in SIZES])
    np.testing.assert_allclose(counts / steps, tokens / tokens.sum(), atol=0.02)
    assert found.num_batches_per_epoch == round(tokens.sum() / 128)


def test_steps_are_the_same_in_any_order(corpus):
    found = batches.Batches(corpus, 7, 4)
    forward = [found.digest(step) for step in range(60)]
    again = batches.Batches(corpus, 7, 4)
    backward = [again.digest(step) for step in reversed(range(60))]
    assert forward == backward[::-1]
    assert len(set(forward)) == 60
    other = batches.Batches(corpus, 8, 4)
    assert forward != [other.digest(step) for step in range(60)]


def test_order_is_pinned(corpus):
    """A new release of grain or NumPy must not reorder a run that is continued."""
    found = batches.Batches(corpus, 0, 4)
    assert [found.rows_at(step)[0] for step in range(12)] == ORDER
    bucket, rows = found.rows_at(0)
    assert (bucket, rows.tolist()) == FIRST


def test_reading_ahead_gives_the_same_batches(corpus):
    found = batches.Batches(corpus, 0, 4)
    stream = found.iterate(9)
    for step in range(9, 15):
        np.testing.assert_array_equal(next(stream).tokens, found.at(step).tokens)


def test_rows_are_multiples(corpus):
    found = batches.Batches(corpus, 0, 6, multiple=6)
    assert found.shapes == ((24, 8), (12, 16), (6, 32))
    found = batches.Batches(corpus_files.split(corpus, 20)[0], 0, 6, multiple=6)
    assert [rows % 6 for rows, _ in found.shapes] == [0] * len(found.shapes)


def test_bad_arguments(corpus):
    with pytest.raises(ValueError, match="a positive multiple of 4, got 6"):
        batches.Batches(corpus, 0, 6, multiple=4)
    with pytest.raises(ValueError, match="a positive multiple of 1, got 0"):
        batches.Batches(corpus, 0, 0)
    with pytest.raises(ValueError, match="`step` must be at least 0, got -1"):
        batches.Batches(corpus, 0, 4).at(-1)
    empty = corpus_files.Corpus((), 200, "", None, {})
    with pytest.raises(ValueError, match="`corpus` must have rows, it has none"):
        batches.Batches(empty, 0, 4)
