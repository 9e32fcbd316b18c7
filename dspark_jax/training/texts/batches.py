"""Batches of a corpus by step number: shuffled, of one length each, without a state.

Every length is a grain pipeline (source, shuffle, repeat, batch) of its own, read at
random positions. Which length a step takes, and which batch of it, follows from (seed,
step): a resumed run needs the step's number only, and any number of devices sees the
same order. A length comes up in proportion to its tokens.
"""

import hashlib
import math
from collections.abc import Iterator
from typing import Any

import grain
import numpy as np

from dspark_jax.training.target_states import Batch
from dspark_jax.training.texts.corpus_files import Corpus

# A period of the order of lengths is at most this many epochs.
_MAX_EPOCHS = 64


class Batches:
    """Random access to the batches of a corpus.

    Args:
      corpus: see `corpus_files.load_corpus`.
      seed: of both orders.
      batch_rows: rows of a batch of the greatest length; shorter ones get more, so that
        all batches hold about as many tokens.
      multiple: rows of every batch are a multiple of it (devices times micro-steps).

    Raises:
      ValueError: an empty corpus, or `batch_rows` no multiple of `multiple`.
    """

    def __init__(
        self, corpus: Corpus, seed: int, batch_rows: int, *, multiple: int = 1
    ):
        if not corpus.buckets:
            raise ValueError("`corpus` must have rows, it has none")
        if batch_rows < 1 or batch_rows % multiple:
            raise ValueError(
                f"`batch_rows` must be a positive multiple of {multiple}, got "
                f"{batch_rows}"
            )
        self.corpus = corpus
        self.seed = seed
        longest = max(bucket.length for bucket in corpus.buckets)
        self.rows = tuple(
            batch_rows * longest // bucket.length // multiple * multiple
            for bucket in corpus.buckets
        )
        sizes = [bucket.num_rows for bucket in corpus.buckets]
        self._orders = [
            make_order(size, rows, seed + index)
            for index, (size, rows) in enumerate(zip(sizes, self.rows, strict=True))
        ]
        # So many epochs that every length has a whole batch at least.
        pairs = list(zip(sizes, self.rows, strict=True))
        epochs = min(max(-(-rows // size) for size, rows in pairs), _MAX_EPOCHS)
        shares = [max(1, round(epochs * size / rows)) for size, rows in pairs]
        self._labels = np.repeat(np.arange(len(shares)), shares)
        self._shares = shares
        self.num_batches_per_epoch = max(1, round(len(self._labels) / epochs))
        self._period: tuple[int, np.ndarray, np.ndarray] | None = None

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """(rows, length) of every kind of batch: what a step is compiled for."""
        lengths = [bucket.length for bucket in self.corpus.buckets]
        return tuple(zip(self.rows, lengths, strict=True))

    def at(self, step: int) -> Batch:
        """The batch of a step, on the host; the same in every process."""
        bucket, rows = self.rows_at(step)
        taken = self.corpus.buckets[bucket].take(rows)
        return Batch(tokens=taken.tokens, loss_mask=taken.loss_mask)

    def rows_at(self, step: int) -> tuple[int, np.ndarray]:
        """The bucket of a step and the indices of its rows."""
        if step < 0:
            raise ValueError(f"`step` must be at least 0, got {step}")
        period, place = divmod(step, len(self._labels))
        labels, ranks = self._order_of(period)
        bucket = int(labels[place])
        number = period * self._shares[bucket] + int(ranks[place])
        return bucket, np.asarray(self._orders[bucket][number])

    def iterate(self, start: int = 0, *, num_threads: int = 2) -> Iterator[Batch]:
        """Batches from step `start` on, without end, read ahead by threads."""
        steps = grain.MapDataset.range(start, 2**62).map(self.at)
        options = grain.ReadOptions(
            num_threads=num_threads, prefetch_buffer_size=2 * num_threads
        )
        return iter(steps.to_iter_dataset(options))

    def digest(self, step: int) -> str:
        """16 hex digits of a step's batch, to compare two runs."""
        batch = self.at(step)
        found = hashlib.sha256()
        for array in (batch.tokens, batch.loss_mask):
            found.update(repr(array.shape).encode())
            found.update(np.ascontiguousarray(array).tobytes())
        return found.hexdigest()[:16]

    def _order_of(self, period: int) -> tuple[np.ndarray, np.ndarray]:
        """The lengths of a period's steps, and how often each came up before."""
        known = self._period
        if known is None or known[0] != period:
            labels = np.random.default_rng([self.seed, 2, period]).permutation(
                self._labels
            )
            ranks = np.empty(len(labels), np.int64)
            for bucket, share in enumerate(self._shares):
                ranks[labels == bucket] = np.arange(share)
            known = (period, labels, ranks)
            self._period = known  # one assignment: threads read it
        return known[1], known[2]


def make_order(num_rows: int, batch_rows: int, seed: int) -> Any:
    """Row indices of batch 0, 1, …: epochs of `num_rows`, each shuffled anew.

    A batch goes across the end of an epoch, so that every row comes up once in each.
    """
    order = grain.MapDataset.range(num_rows).seed(seed % 2**32).shuffle().repeat()
    return order.batch(batch_rows, batch_fn=np.asarray)


def padded_length(lengths: np.ndarray, multiple: int) -> int:
    """The greatest length, rounded up: few shapes, few compilations."""
    return math.ceil(int(np.max(lengths)) / multiple) * multiple
