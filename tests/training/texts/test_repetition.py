"""Repeated n-grams, against a count by hand."""

import collections

import numpy as np

from dspark_jax.training.texts import repetition


def by_hand(text, size):
    grams = [tuple(text[i : i + size]) for i in range(len(text) - size + 1)]
    counts = collections.Counter(grams)
    marked = np.zeros(len(text), bool)
    for begin, gram in enumerate(grams):
        if counts[gram] > 1:
            marked[begin : begin + size] = True
    return marked.mean()


def test_shares_equal_a_count_by_hand():
    rng = np.random.default_rng(0)
    texts = rng.integers(0, 3, (50, 40))
    found = repetition.repeated_shares(texts, np.ones_like(texts, bool), size=4)
    expected = [by_hand(text.tolist(), 4) for text in texts]
    np.testing.assert_allclose(found, expected)
    assert 0 < np.mean(found) < 1


def test_only_chosen_tokens_count():
    loop = np.arange(40) % 4
    chosen = np.zeros(40, bool)
    chosen[:10] = True  # shorter than one 20-gram
    chosen[15:] = True  # 25 tokens: 20-grams at 15 and 19 are alike, so are 16 and 20
    found = repetition.repeated_shares(np.stack([loop, loop]), np.stack([chosen] * 2))
    np.testing.assert_allclose(found, 25 / 35)
    short = repetition.repeated_shares(loop[None, :19], chosen[None, :19])
    np.testing.assert_array_equal(short, [0.0])
    nothing = repetition.repeated_shares(loop[None], np.zeros((1, 40), bool))
    np.testing.assert_array_equal(nothing, [0.0])
