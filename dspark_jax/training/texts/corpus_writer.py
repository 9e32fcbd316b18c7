"""Writes a corpus folder batch by batch, so that it need not fit into memory.

Rows are appended and then committed: the folder always holds a valid corpus, and what
an interrupted run left behind its last commit is cut off when it is continued.
"""

import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import IO, Any

import numpy as np

from dspark_jax import tensor_files
from dspark_jax.training.texts import array_files, corpus_files
from dspark_jax.training.texts.data import Rows


def save_corpus(
    folder: str | os.PathLike,
    buckets: Sequence[Rows],
    *,
    vocab_size: int,
    fingerprint: str = "",
    seed: int | None = None,
    counts: Mapping[str, Any] | None = None,
) -> None:
    """Writes rows that are in memory, one entry of `buckets` a length.

    Raises:
      FileExistsError: the folder holds a corpus already.
      ValueError: two entries of one length, or an id outside the vocabulary.
    """
    with CorpusWriter(
        folder, vocab_size=vocab_size, fingerprint=fingerprint, seed=seed
    ) as writer:
        lengths = [rows.tokens.shape[1] for rows in buckets]
        if len(set(lengths)) < len(lengths):
            raise ValueError(f"buckets must have distinct lengths, got {lengths}")
        for rows in buckets:
            writer.add(np.asarray(rows.tokens), np.asarray(rows.loss_mask))
        writer.commit(counts or {})


class CorpusWriter:
    """Writes a corpus folder batch by batch; it need not fit into memory.

    Args:
      folder: made if it is not there.
      resume: go on behind the last commit of the same corpus.

    Raises:
      FileExistsError: a corpus is there, and `resume` is false.
      ValueError: a corpus of another target or seed is there.
    """

    def __init__(
        self,
        folder: str | os.PathLike,
        *,
        vocab_size: int,
        fingerprint: str = "",
        seed: int | None = None,
        resume: bool = False,
    ):
        self.folder = pathlib.Path(folder)
        self.counts: dict[str, Any] = {}
        self.num_rows: dict[int, int] = {}  # by length, as appended
        self._files: dict[int, tuple[IO[bytes], IO[bytes]]] = {}
        self._dtype = np.dtype(np.uint16 if vocab_size <= 2**16 else np.int32)
        self._about: dict[str, Any] = {
            "version": corpus_files.VERSION,
            "target_fingerprint": fingerprint,
            "vocab_size": vocab_size,
            "seed": seed,
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / corpus_files.FILE
        if not path.exists():
            return
        if not resume:
            raise FileExistsError(f"{path} is there already: give another folder")
        found = corpus_files.read_about(path)
        for name, value in self._about.items():
            if found[name] != value:
                raise ValueError(
                    f"{path} cannot be continued: its {name} is {found[name]!r}, not "
                    f"{value!r}"
                )
        self.counts = dict(found["counts"])
        for entry in found["buckets"]:
            self._reopen(entry["length"], entry["num_rows"])

    def __enter__(self) -> "CorpusWriter":
        return self

    def __exit__(self, *exception: Any) -> None:
        for pair in self._files.values():
            for file in pair:
                file.close()
        self._files.clear()

    def add(
        self, tokens: np.ndarray, loss_mask: np.ndarray, length: int | None = None
    ) -> None:
        """Appends rows [N, S], padded to `length` (S if absent).

        Raises:
          ValueError: shapes that differ or pass `length`, or an id outside the
            vocabulary.
        """
        tokens, loss_mask = np.asarray(tokens), np.asarray(loss_mask, np.bool_)
        if tokens.ndim != 2 or tokens.shape != loss_mask.shape:
            raise ValueError(
                "`tokens` and `loss_mask` must have one shape (N, S), got "
                f"{tokens.shape} and {loss_mask.shape}"
            )
        length = tokens.shape[1] if length is None else length
        if not tokens.shape[1] <= length <= corpus_files.MAX_LENGTH:
            raise ValueError(
                f"`length` must lie in {tokens.shape[1]}..{corpus_files.MAX_LENGTH}, "
                f"got {length}"
            )
        if not tokens.size:
            return
        corpus_files.check_ids("`tokens`", tokens, self._about["vocab_size"])
        padding = ((0, 0), (0, length - tokens.shape[1]))
        packed = np.packbits(np.pad(loss_mask, padding), axis=1)
        tokens_file, mask_file = self._open(length)
        tokens_file.write(np.pad(tokens, padding).astype(self._dtype).tobytes())
        mask_file.write(packed.tobytes())
        self.num_rows[length] += tokens.shape[0]

    def progress(self, settings: Mapping[str, Any], like: Any) -> Any:
        """The counts of the last commit, as an object like `like`.

        Args:
          settings: what made the rows; kept in the counts as `settings`.
          like: a dataclass of counts with a field `settings`.

        Raises:
          ValueError: the corpus was made otherwise.
        """
        settings = json.loads(json.dumps(settings))  # lists, as they are read back
        if not self.num_rows and not self.counts:
            return dataclasses.replace(like, settings=settings)
        where = self.folder / corpus_files.FILE
        if set(self.counts) != set(dataclasses.asdict(like)):
            raise ValueError(
                f"{where} cannot be continued: another command has made it"
            )
        known = self.counts["settings"]
        for name in sorted(set(settings) | set(known)):
            ours, theirs = settings.get(name), known.get(name)
            if ours != theirs:
                raise ValueError(
                    f"{where} cannot be continued: it was made with {name} {theirs!r}, "
                    f"not {ours!r}"
                )
        return type(like)(**self.counts)

    def commit(self, counts: Mapping[str, Any]) -> None:
        """Makes everything added so far part of the corpus.

        Rows reach the disk first, then the arrays' headers, then `corpus.json`, which
        is replaced at once: a crash in between leaves the state of the last commit.
        """
        for length, (tokens_file, mask_file) in self._files.items():
            num_rows = self.num_rows[length]
            for file, width, dtype in (
                (tokens_file, length, self._dtype),
                (mask_file, -(-length // 8), np.dtype(np.uint8)),
            ):
                array_files.sync(file)
                file.seek(0)
                array_files.write_header(file, num_rows, width, dtype)
                array_files.sync(file)
                file.seek(0, os.SEEK_END)
        self.counts = dict(counts)
        buckets = [
            {"length": length, "num_rows": count}
            for length, count in sorted(self.num_rows.items())
        ]
        about = {**self._about, "buckets": buckets, "counts": self.counts}
        tensor_files.write_json(self.folder / corpus_files.FILE, about)

    def _open(self, length: int) -> tuple[IO[bytes], IO[bytes]]:
        if length not in self._files:
            tokens_path, mask_path = corpus_files.paths(self.folder, length)
            pair = (tokens_path.open("w+b"), mask_path.open("w+b"))
            self._files[length] = pair
            self.num_rows[length] = 0
            array_files.write_header(pair[0], 0, length, self._dtype)
            array_files.write_header(pair[1], 0, -(-length // 8), np.dtype(np.uint8))
        return self._files[length]

    def _reopen(self, length: int, num_rows: int) -> None:
        """Cuts what the last commit does not know, and goes to the end."""
        pair = []
        widths = (length, -(-length // 8))
        dtypes = (self._dtype, np.dtype(np.uint8))
        for path, width, dtype in zip(
            corpus_files.paths(self.folder, length), widths, dtypes, strict=True
        ):
            array_files.map_rows(path, num_rows, width, (dtype,))
            file = path.open("r+b")
            pair.append(file)
            _, offset = array_files.read_header(path, file)
            file.truncate(offset + num_rows * width * dtype.itemsize)
            file.seek(0, os.SEEK_END)
        self._files[length] = (pair[0], pair[1])
        self.num_rows[length] = num_rows
