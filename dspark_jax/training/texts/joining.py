"""One corpus of several: texts that were written side by side, or of different kinds.

Rows are copied as they are, in the order of the folders; one that is there already is
dropped. The folder holds a corpus only when everything has been copied.
"""

import dataclasses
import hashlib
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dspark_jax.training.texts import corpus_files
from dspark_jax.training.texts.corpus_writer import CorpusWriter

_CHUNK = 4096  # rows that are copied at a time


@dataclasses.dataclass
class Counts:
    """What was copied; `sources` has the counts of every folder."""

    num_rows: int = 0
    num_tokens: int = 0
    num_supervised: int = 0
    dropped_same_conversation: int = 0
    sources: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def report(self) -> str:
        """A few lines for a person."""
        return (
            f"{self.num_rows} rows of {len(self.sources)} corpora, {self.num_tokens} "
            f"tokens, {self.num_supervised} of answers\n"
            f"{self.dropped_same_conversation} rows dropped: the same conversation"
        )


def join(
    folder: str | os.PathLike,
    sources: Sequence[str | os.PathLike],
    *,
    log: Callable[[Counts], Any] = lambda counts: None,
) -> Counts:
    """Writes a corpus folder with the rows of other corpus folders.

    Args:
      folder: of the new corpus.
      sources: two corpus folders or more, of one target.
      log: called after every few thousand rows.

    Raises:
      FileExistsError: a corpus is there already.
      FileNotFoundError, ValueError: a source that is missing, damaged or of another
        target, or fewer than two.
    """
    if len(sources) < 2:
        raise ValueError(f"`sources` must name two corpora or more, got {len(sources)}")
    corpora: list[corpus_files.Corpus] = []
    vocab_size, fingerprint = None, ""
    for source in sources:
        corpora.append(
            corpus_files.load_corpus(
                source, vocab_size=vocab_size, fingerprint=fingerprint
            )
        )
        vocab_size = corpora[0].vocab_size
        fingerprint = fingerprint or corpora[-1].target_fingerprint
    known = corpora[0].vocab_size, fingerprint
    counts = Counts(sources=[dict(corpus.counts) for corpus in corpora])
    seen: set[bytes] = set()
    with CorpusWriter(folder, vocab_size=known[0], fingerprint=known[1]) as writer:
        for corpus in corpora:
            for bucket in corpus.buckets:
                for begin in range(0, bucket.num_rows, _CHUNK):
                    rows = bucket.take(slice(begin, begin + _CHUNK))
                    tokens, mask = np.asarray(rows.tokens), np.asarray(rows.loss_mask)
                    is_new = np.array([_is_new(row, seen) for row in tokens], np.bool_)
                    writer.add(tokens[is_new], mask[is_new])
                    counts.num_rows += int(is_new.sum())
                    counts.num_tokens += int(is_new.sum()) * bucket.length
                    counts.num_supervised += int(mask[is_new].sum())
                    counts.dropped_same_conversation += int((~is_new).sum())
                    log(counts)
        writer.commit(dataclasses.asdict(counts))
    return counts


def _is_new(row: np.ndarray, seen: set[bytes]) -> bool:
    """Whether a row's ids, without their padding, are met for the first time."""
    name = hashlib.blake2b(np.trim_zeros(row, "b").tobytes(), digest_size=12).digest()
    if name in seen:
        return False
    seen.add(name)
    return True
