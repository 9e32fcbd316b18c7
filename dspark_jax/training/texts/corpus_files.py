"""A tokenised corpus on disk: one folder, mapped into memory, never unpickled.

`corpus.json` says what the rows are; `tokens_<length>.npy` and `loss_mask_<length>.npy`
(packed bits) hold the rows of one length, right-padded with 0. Everything that is read
is checked first. `corpus_writer` writes such folders.
"""

import dataclasses
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from dspark_jax import tensor_files
from dspark_jax.training.texts import array_files
from dspark_jax.training.texts.data import Rows

FILE = "corpus.json"
VERSION = 1
MAX_LENGTH = 2**20
_KEYS = {"version", "target_fingerprint", "vocab_size", "buckets", "seed", "counts"}
_CHUNK = 2**24  # tokens that are checked at a time


@dataclasses.dataclass(frozen=True, eq=False)
class Bucket:
    """Rows of one length.

    Attributes:
      tokens: uint16 or int32 [N, length], mapped from the file.
      packed: uint8 [N, ceil(length / 8)], the loss masks' bits.
      index: int64 [n], the file's rows that belong here; None: all.
    """

    tokens: np.ndarray
    packed: np.ndarray
    index: np.ndarray | None = None

    @property
    def length(self) -> int:
        return self.tokens.shape[1]

    @property
    def num_rows(self) -> int:
        return self.tokens.shape[0] if self.index is None else self.index.shape[0]

    def take(self, rows: Any) -> Rows:
        """The rows of these indices, or of a slice: int32 and bool, on the host."""
        if self.index is not None:
            rows = self.index[rows]
        bits = np.unpackbits(self.packed[rows], axis=-1, count=self.length)
        tokens = np.asarray(self.tokens[rows], np.int32)
        return Rows(tokens=tokens, loss_mask=bits.astype(np.bool_))  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
    """A loaded corpus folder; buckets are sorted by length.

    Attributes:
      target_fingerprint: of the target that the ids belong to; "" if not known.
      seed: of a synthesised corpus.
      counts: what was read, dropped (and why), truncated and kept.
    """

    buckets: tuple[Bucket, ...]
    vocab_size: int
    target_fingerprint: str
    seed: int | None
    counts: Mapping[str, Any]

    @property
    def num_rows(self) -> int:
        return sum(bucket.num_rows for bucket in self.buckets)

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows, padding included."""
        return sum(bucket.num_rows * bucket.length for bucket in self.buckets)


def load_corpus(
    folder: str | os.PathLike,
    *,
    vocab_size: int | None = None,
    fingerprint: str | None = None,
) -> Corpus:
    """Opens a corpus folder; the rows stay on disk until they are taken.

    Args:
      vocab_size: of the target, which must be the corpus's.
      fingerprint: of the target; compared where both are known.

    Raises:
      FileNotFoundError: no corpus.json, or a file that it names is missing.
      ValueError: a damaged or foreign file, an id outside the vocabulary, or another
        target.
    """
    folder = pathlib.Path(folder)
    path = folder / FILE
    about = read_about(path)
    if vocab_size is not None and about["vocab_size"] != vocab_size:
        raise ValueError(
            f"{path} was made for a vocabulary of {about['vocab_size']} tokens, the "
            f"target has {vocab_size}"
        )
    ours = about["target_fingerprint"]
    if fingerprint and ours and ours != fingerprint:
        raise ValueError(
            f"{path} was made for another target: fingerprint {ours}, the target has "
            f"{fingerprint}"
        )
    buckets = []
    for entry in about["buckets"]:
        length, num_rows = entry["length"], entry["num_rows"]
        tokens_path, mask_path = paths(folder, length)
        tokens = array_files.map_rows(
            tokens_path, num_rows, length, (np.uint16, np.int32)
        )
        packed = array_files.map_rows(mask_path, num_rows, -(-length // 8), (np.uint8,))
        check_ids(tokens_path, tokens, about["vocab_size"])
        buckets.append(Bucket(tokens, packed))
    return Corpus(
        buckets=tuple(buckets),
        vocab_size=about["vocab_size"],
        target_fingerprint=ours,
        seed=about["seed"],
        counts=about["counts"],
    )


def split(corpus: Corpus, num_rows: int, seed: int = 0) -> tuple[Corpus, Corpus]:
    """Sets `num_rows` rows aside: (held back, the rest), both views of the same files.

    Every length gives its share, rows drawn by the seed.

    Raises:
      ValueError: fewer than one row would remain on either side.
    """
    if not 0 < num_rows < corpus.num_rows:
        raise ValueError(
            f"`num_rows` must lie in 1..{corpus.num_rows - 1}, got {num_rows}"
        )
    sizes = np.asarray([bucket.num_rows for bucket in corpus.buckets], np.int64)
    wanted = sizes * num_rows / corpus.num_rows
    shares = np.floor(wanted).astype(np.int64)
    order = np.argsort(shares - wanted, kind="stable")  # largest remainder first
    shares[order[: num_rows - int(shares.sum())]] += 1
    held: list[Bucket] = []
    rest: list[Bucket] = []
    for bucket, share in zip(corpus.buckets, shares, strict=True):
        rows = np.random.default_rng([seed, bucket.length]).permutation(bucket.num_rows)
        for part, chosen in ((held, rows[:share]), (rest, rows[share:])):
            chosen = np.sort(chosen)
            index = chosen if bucket.index is None else bucket.index[chosen]
            if index.size:
                part.append(dataclasses.replace(bucket, index=index))
    return (
        dataclasses.replace(corpus, buckets=tuple(held)),
        dataclasses.replace(corpus, buckets=tuple(rest)),
    )


def token_counts(corpus: Corpus) -> np.ndarray:
    """How often every id is supervised, int64 [V]: the order of a draft vocabulary."""
    counts = np.zeros(corpus.vocab_size, np.int64)
    for bucket in corpus.buckets:
        size = max(1, _CHUNK // bucket.length)
        for begin in range(0, bucket.num_rows, size):
            rows = bucket.take(slice(begin, begin + size))
            chosen = np.asarray(rows.tokens)[np.asarray(rows.loss_mask)]
            counts += np.bincount(chosen, minlength=corpus.vocab_size)
    return counts


def paths(folder: pathlib.Path, length: int) -> tuple[pathlib.Path, pathlib.Path]:
    """The files of one length: tokens and loss masks."""
    return folder / f"tokens_{length}.npy", folder / f"loss_mask_{length}.npy"


def read_about(path: pathlib.Path) -> dict[str, Any]:
    """corpus.json of a folder, every field checked."""
    if not path.is_file():
        raise FileNotFoundError(
            f"{path.parent} is not a corpus folder: it has no {FILE}"
        )
    about = tensor_files.read_json(path)
    if set(about) != _KEYS:
        raise ValueError(
            f"{path} must have the keys {', '.join(sorted(_KEYS))}, got "
            f"{', '.join(sorted(about))}"
        )
    if about["version"] != VERSION:
        raise ValueError(f"{path}: version must be {VERSION}, got {about['version']!r}")
    if not isinstance(about["target_fingerprint"], str):
        raise ValueError(f"{path}: target_fingerprint must be text")
    _check_count(f"{path}: vocab_size", about["vocab_size"], 1, 2**31 - 1)
    if about["seed"] is not None:
        _check_count(f"{path}: seed", about["seed"], 0, 2**63)
    if not isinstance(about["counts"], dict):
        raise ValueError(f"{path}: counts must be an object")
    buckets = about["buckets"]
    if not isinstance(buckets, list):
        raise ValueError(f"{path}: buckets must be a list")
    for entry in buckets:
        if not isinstance(entry, dict) or set(entry) != {"length", "num_rows"}:
            raise ValueError(
                f"{path}: buckets must have the keys length and num_rows, got {entry!r}"
            )
        _check_count(f"{path}: length", entry["length"], 1, MAX_LENGTH)
        _check_count(f"{path}: num_rows", entry["num_rows"], 1, 2**40)
    lengths = [entry["length"] for entry in buckets]
    if lengths != sorted(set(lengths)):
        raise ValueError(f"{path}: lengths must increase, got {lengths}")
    return about


def _check_count(name: str, value: Any, low: int, high: int) -> None:
    if (
        not isinstance(value, int)
        or isinstance(value, bool)
        or not low <= value <= high
    ):
        raise ValueError(f"{name} must be an integer in {low}..{high}, got {value!r}")


def check_ids(where: Any, tokens: np.ndarray, vocab_size: int) -> None:
    """Raises ValueError for the first id outside the vocabulary, a piece at a time."""
    size = max(1, _CHUNK // tokens.shape[1])
    for begin in range(0, tokens.shape[0], size):
        part = tokens[begin : begin + size]
        for value in (int(part.min()), int(part.max())):
            if not 0 <= value < vocab_size:
                raise ValueError(
                    f"{where} must hold ids in 0..{vocab_size - 1}, got {value}"
                )
