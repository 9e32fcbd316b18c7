"""How much of a text repeats itself: small models loop, and loops flatter a drafter."""

import numpy as np

NGRAM = 20


def repeated_shares(
    tokens: np.ndarray, chosen: np.ndarray, size: int = NGRAM
) -> np.ndarray:
    """Share of every row's chosen tokens in n-grams that occur twice, float64 [N].

    >>> text = np.asarray([[7, 8, 9, 7, 8, 9, 1, 2]])
    >>> repeated_shares(text, np.ones_like(text, bool), size=3)
    array([0.75])

    Args:
      tokens: ids [N, S].
      chosen: bool [N, S]; an n-gram counts if all of it is chosen.
      size: tokens of an n-gram.
    """
    tokens, chosen = np.asarray(tokens), np.asarray(chosen, np.bool_)
    num_rows, length = tokens.shape
    total = chosen.sum(axis=1)
    if length < size or not num_rows:
        return np.zeros(num_rows)
    windows = length - size + 1
    # 64-bit polynomial hashes of all windows; numbers wrap around on purpose.
    hashes = np.zeros((num_rows, windows), np.uint64)
    for place in range(size):
        hashes = hashes * np.uint64(6364136223846793005)
        hashes += tokens[:, place : place + windows].astype(np.uint64)
        hashes += np.uint64(1442695040888963407)
    before = np.cumsum(np.pad(chosen, ((0, 0), (1, 0))), axis=1)  # [N, S + 1]
    is_whole = before[:, size:] - before[:, :-size] == size  # [N, windows]
    repeated = np.zeros((num_rows, length), np.bool_)
    for row in range(num_rows):
        where = np.flatnonzero(is_whole[row])
        _, which, counts = np.unique(
            hashes[row, where], return_inverse=True, return_counts=True
        )
        for begin in where[counts[which] > 1]:
            repeated[row, begin : begin + size] = True
    return np.sum(repeated & chosen, axis=1) / np.maximum(total, 1)
