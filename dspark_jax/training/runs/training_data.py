"""What a run is fed with: batches by step number, held-out batches, counts.

The batch of a step depends on the seed and the step's number only, so that a run goes
on after a restart as if nothing had happened. A corpus of rows of one length, which the
target wrote itself, is one source of batches, a corpus folder (`batches`) another.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from dspark_jax.training.target_states import Batch
from dspark_jax.training.texts import corpus_files
from dspark_jax.training.texts.batches import Batches
from dspark_jax.training.texts.corpus_files import Corpus
from dspark_jax.training.texts.data import Rows


class BatchSource(Protocol):
    """Batches by step number, always the same ones."""

    def at(self, step: int) -> Batch:
        """The batch of this step, host arrays: tokens [B, S], loss_mask [B, S]."""


class TrainingData(NamedTuple):
    """Everything that a run needs of its texts."""

    batches: BatchSource
    held_out: tuple[Batch, ...]  # never trained on
    num_rows: int  # that are trained on
    token_counts: np.ndarray  # int64 [V], of supervised tokens
    counts: dict[str, Any]  # for reports: rows, tokens, what was dropped and why


class RowBatches:
    """Every epoch is a new permutation of the rows; its incomplete last batch drops."""

    def __init__(self, rows: Rows, seed: int, batch_rows: int):
        num_rows = rows.tokens.shape[0]
        if num_rows < batch_rows:
            raise ValueError(
                f"a batch of {batch_rows} rows needs as many rows, got {num_rows}"
            )
        self._rows, self._seed, self._size = rows, seed, batch_rows
        self._epoch = -1
        self._order = np.zeros(0, np.int64)

    def at(self, step: int) -> Batch:
        """The batch of this step."""
        num_rows = self._rows.tokens.shape[0]
        epoch, index = divmod(step, num_rows // self._size)
        if epoch != self._epoch:
            rng = np.random.default_rng([self._seed, 1, epoch])
            self._order, self._epoch = rng.permutation(num_rows), epoch
        chosen = self._order[index * self._size : (index + 1) * self._size]
        return _batch(self._rows, chosen)


def of_rows(
    rows: Rows, *, seed: int, batch_rows: int, held_out_rows: int, vocab_size: int
) -> TrainingData:
    """Training data of rows in memory; the first `held_out_rows` are held out.

    Raises:
      ValueError: too few rows.
    """
    rows = jax.tree.map(np.asarray, rows)
    num_rows = rows.tokens.shape[0]
    if num_rows < held_out_rows + batch_rows:
        raise _too_few(num_rows, held_out_rows, batch_rows)
    trained = Rows(
        tokens=rows.tokens[held_out_rows:], loss_mask=rows.loss_mask[held_out_rows:]
    )
    # An anchor needs a supervised successor.
    has_anchor = np.any(rows.loss_mask[:, :-1] & rows.loss_mask[:, 1:], axis=1)
    tokens = trained.tokens[trained.loss_mask].astype(np.int64)
    return TrainingData(
        batches=RowBatches(trained, seed, batch_rows),
        held_out=tuple(
            _batch(rows, np.arange(begin, begin + batch_rows))
            for begin in range(0, held_out_rows - batch_rows + 1, batch_rows)
        ),
        num_rows=trained.tokens.shape[0],
        token_counts=np.bincount(tokens, minlength=vocab_size),
        counts={
            "num_rows": num_rows,
            "num_held_out_rows": held_out_rows,
            "num_tokens": int(rows.tokens.size),
            "num_supervised_tokens": int(rows.loss_mask.sum()),
            "num_unsupervised_rows": int(np.sum(~has_anchor)),
        },
    )


def _too_few(num_rows: int, held_out_rows: int, batch_rows: int) -> ValueError:
    return ValueError(
        f"{num_rows} rows are too few for held_out_rows = {held_out_rows} and a batch "
        f"of batch_rows = {batch_rows}: write more, or set both lower"
    )


def of_corpus(
    corpus: Corpus, *, seed: int, batch_rows: int, held_out_rows: int
) -> TrainingData:
    """Training data of a corpus folder; `held_out_rows` drawn by the seed are held out.

    Batches of shorter rows have a multiple of `batch_rows` rows: the same ones on any
    number of devices that divides `batch_rows`.

    Raises:
      ValueError: too few rows.
    """
    if corpus.num_rows < held_out_rows + batch_rows:
        raise _too_few(corpus.num_rows, held_out_rows, batch_rows)
    held, rest = corpus_files.split(corpus, held_out_rows, seed)
    batches = Batches(rest, seed, batch_rows, multiple=batch_rows)
    held_out = tuple(
        _of_corpus(bucket.take(slice(begin, begin + batch_rows)))
        for bucket in held.buckets
        for begin in range(0, bucket.num_rows - batch_rows + 1, batch_rows)
    )
    if not held_out:
        raise ValueError(
            f"held_out_rows = {held_out_rows}, over {len(held.buckets)} lengths: "
            f"that leaves no batch of {batch_rows} rows; hold out more"
        )
    return TrainingData(
        batches=batches,
        held_out=held_out,
        num_rows=rest.num_rows,
        token_counts=corpus_files.token_counts(rest),
        counts={
            "num_rows": corpus.num_rows,
            "num_held_out_rows": held_out_rows,
            "num_tokens": corpus.num_tokens,
            **_flat(corpus.counts),
        },
    )


def frequent_tokens(token_counts: np.ndarray, limit: int = 16384) -> list[int]:
    """Ids that occur, most frequent first, at most `limit`."""
    order = np.argsort(-token_counts, kind="stable")[:limit]
    return [int(token) for token in order if token_counts[token] > 0]


def _batch(rows: Rows, index: np.ndarray) -> Batch:
    return Batch(
        tokens=rows.tokens[index].astype(np.int32), loss_mask=rows.loss_mask[index]
    )


def _of_corpus(rows: Rows) -> Batch:
    return Batch(tokens=rows.tokens, loss_mask=rows.loss_mask)


def _flat(counts: Mapping[str, Any], name: str = "") -> dict[str, Any]:
    """Numbers by dotted name; settings and other words are left out."""
    found: dict[str, Any] = {}
    for key, value in counts.items():
        path = f"{name}.{key}" if name else key
        if isinstance(value, Mapping) and key != "settings":
            found |= _flat(value, path)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found[path] = value
    return found
