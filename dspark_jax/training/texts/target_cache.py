"""DeepSpec's target cache, version 2: texts with the target's states, read from disk.

`manifest.json` names the target's layers and the shards, `samples.idx` holds one record
of 56 bytes a sample, and a shard the arrays themselves, back to back: ids, two masks,
the tapped layers and the last hidden states in bfloat16. Shards are mapped into memory;
every offset is checked before it is followed. A token takes (M + 1) * D * 2 bytes: that
is why training computes the states in its step unless a cache is given.
"""

import dataclasses
import math
import os
import pathlib
import struct
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from dspark_jax import tensor_files
from dspark_jax.training.target_states import Batch, TargetStates
from dspark_jax.training.texts import batches

MANIFEST, INDEX = "manifest.json", "samples.idx"
VERSION = 2
RECORD = struct.Struct("<QIIQQQQQ")
# Bounds under which no size of an array passes 64 bits.
_MOST = {"num_samples": 2**40, "num_shards": 2**32 - 1, "hidden_size": 2**24}
_MOST_LAYERS, _MOST_TOKENS = 2**12, 2**20
_FIXED = {
    "version": VERSION,
    "hidden_dtype": "bfloat16",
    "token_dtype": "int32",
    "mask_dtype": "uint8",
    "index_record_size": RECORD.size,
}
_FIELDS = np.dtype(
    [
        ("sample_id", "<u8"),
        ("shard_id", "<u4"),
        ("length", "<u4"),
        ("tokens", "<u8"),
        ("attention_mask", "<u8"),
        ("loss_mask", "<u8"),
        ("taps", "<u8"),
        ("hidden", "<u8"),
    ]
)


@dataclasses.dataclass(frozen=True, eq=False)
class Sample:
    """One text and what the target made of it; views of a shard."""

    tokens: np.ndarray  # int32 [S]
    loss_mask: np.ndarray  # bool [S]
    taps: np.ndarray  # bfloat16 [S, M*D]
    hidden: np.ndarray  # bfloat16 [S, D]


@dataclasses.dataclass(frozen=True, eq=False)
class TargetCache:
    """An opened cache; see `load_target_cache`.

    Attributes:
      width: D of the target.
      tap_layers: as in `DrafterConfig`.
      target_name: what the cache's writer called the target.
    """

    folder: pathlib.Path
    width: int
    tap_layers: tuple[int, ...]
    target_name: str
    vocab_size: int
    _records: np.ndarray  # of _FIELDS
    _shards: tuple[np.ndarray, ...]  # uint8, mapped

    @property
    def num_samples(self) -> int:
        return len(self._records)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of every sample, int64 [N]."""
        return self._records["length"].astype(np.int64)

    def sample(self, index: int) -> Sample:
        """One sample.

        Raises:
          IndexError: no such sample.
          ValueError: an id outside the vocabulary, or a mask of other values than 0, 1.
        """
        if not 0 <= index < self.num_samples:
            raise IndexError(
                f"sample {index} of a cache of {self.num_samples} was asked for"
            )
        record = self._records[index]
        length = int(record["length"])
        shard = self._shards[record["shard_id"]]

        def read(name: str, dtype: Any, *shape: int) -> np.ndarray:
            begin, dtype = int(record[name]), np.dtype(dtype)
            data = shard[begin : begin + math.prod(shape) * dtype.itemsize]
            return np.asarray(data).view(dtype).reshape(shape)

        where = f"{self.folder}: sample {index}"
        tokens = read("tokens", "<i4", length).astype(np.int32)
        if tokens.min() < 0 or tokens.max() >= self.vocab_size:
            raise ValueError(
                f"{where} must hold ids in 0..{self.vocab_size - 1}, got "
                f"{tokens.min()}..{tokens.max()}"
            )
        if not np.all(read("attention_mask", np.uint8, length) == 1):
            raise ValueError(f"{where}: attention_mask must be 1 everywhere")
        loss_mask = read("loss_mask", np.uint8, length)
        if loss_mask.max() > 1:
            raise ValueError(
                f"{where}: loss_mask must be 0 or 1, got {loss_mask.max()}"
            )
        wide = len(self.tap_layers) * self.width
        return Sample(
            tokens=tokens,
            loss_mask=loss_mask.astype(np.bool_),
            taps=read("taps", ml_dtypes.bfloat16, length, wide),
            hidden=read("hidden", ml_dtypes.bfloat16, length, self.width),
        )

    def take(
        self, indices: Sequence[int] | np.ndarray, multiple: int = 1
    ) -> tuple[Batch, TargetStates]:
        """Samples as one batch on the host, right-padded with zeros.

        Args:
          multiple: the length is rounded up to a multiple of it.
        """
        found = [self.sample(int(index)) for index in indices]
        lengths = np.asarray([len(sample.tokens) for sample in found])
        width = batches.padded_length(lengths, multiple)

        def collate(name: str) -> Any:
            parts = [getattr(sample, name) for sample in found]
            out = np.zeros((len(parts), width, *parts[0].shape[1:]), parts[0].dtype)
            for row, part in enumerate(parts):
                out[row, : part.shape[0]] = part
            return out

        return (
            Batch(tokens=collate("tokens"), loss_mask=collate("loss_mask")),
            TargetStates(taps=collate("taps"), hidden=collate("hidden")),
        )


class CacheBatches:
    """Random access to batches of a cache by step number, shuffled by seed.

    Args:
      multiple: lengths are rounded up to a multiple of it: few shapes to compile.

    Raises:
      ValueError: fewer than one row a batch.
    """

    def __init__(
        self, cache: TargetCache, seed: int, batch_rows: int, *, multiple: int = 64
    ):
        if batch_rows < 1:
            raise ValueError(f"`batch_rows` must be at least 1, got {batch_rows}")
        self.cache = cache
        self.multiple = multiple
        self.num_batches_per_epoch = max(1, cache.num_samples // batch_rows)
        self._order = batches.make_order(cache.num_samples, batch_rows, seed)

    def at(self, step: int) -> tuple[Batch, TargetStates]:
        """The batch of a step and the target's states."""
        if step < 0:
            raise ValueError(f"`step` must be at least 0, got {step}")
        return self.cache.take(self._order[step], self.multiple)


def load_target_cache(
    folder: str | os.PathLike,
    *,
    vocab_size: int,
    width: int | None = None,
    tap_layers: Sequence[int] | None = None,
) -> TargetCache:
    """Opens a cache folder; samples stay on disk until they are taken.

    Args:
      vocab_size: of the target: no id may reach it.
      width, tap_layers: of the target and the drafter, which must be the cache's.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: a damaged file, or states of another target or of other layers.
    """
    folder = pathlib.Path(folder)
    path = folder / MANIFEST
    if not path.is_file():
        raise FileNotFoundError(f"{folder} is not a target cache: it has no {MANIFEST}")
    manifest = tensor_files.read_json(path)
    _check_manifest(path, manifest)
    found_width = manifest["hidden_size"]
    found_layers = tuple(manifest["target_layer_ids"])
    if width is not None and found_width != width:
        raise ValueError(
            f"{path} holds states of another target: hidden_size is {found_width}, the "
            f"target's width is {width}"
        )
    if tap_layers is not None and found_layers != tuple(tap_layers):
        raise ValueError(
            f"{path} holds other layers: target_layer_ids are {list(found_layers)}, "
            f"the drafter taps {list(tap_layers)}"
        )
    shards = tuple(_map(folder / shard["file_name"]) for shard in manifest["shards"])
    index_path = folder / INDEX
    records = _map(index_path)
    if records.size != manifest["num_samples"] * RECORD.size:
        raise ValueError(
            f"{index_path} must have {manifest['num_samples']} records of "
            f"{RECORD.size} bytes, got {records.size} bytes"
        )
    records = np.asarray(records).view(_FIELDS)
    _check_records(index_path, records, shards, found_width, len(found_layers))
    return TargetCache(
        folder=folder,
        width=found_width,
        tap_layers=found_layers,
        target_name=str(manifest.get("target_model_name_or_path", "")),
        vocab_size=vocab_size,
        _records=records,
        _shards=shards,
    )


def _check_manifest(path: pathlib.Path, manifest: dict[str, Any]) -> None:
    for name in (*_FIXED, *_MOST, "target_layer_ids", "shards"):
        if name not in manifest:
            raise ValueError(f"{path} lacks {name!r}")
    for name, value in _FIXED.items():
        if manifest[name] != value:
            raise ValueError(
                f"{path}: {name} must be {value!r}, got {manifest[name]!r}"
            )
    for name in _MOST:
        if not _is_int(manifest[name]) or not 1 <= manifest[name] <= _MOST[name]:
            raise ValueError(
                f"{path}: {name} must be an integer in 1..{_MOST[name]}, got "
                f"{manifest[name]!r}"
            )
    layers = manifest["target_layer_ids"]
    is_list = isinstance(layers, list) and layers and all(map(_is_int, layers))
    if (
        not is_list
        or layers[0] < -1
        or layers != sorted(set(layers))
        or len(layers) > _MOST_LAYERS
    ):
        raise ValueError(
            f"{path}: target_layer_ids must be increasing integers from -1 on, got "
            f"{layers!r}"
        )
    shards = manifest["shards"]
    if not isinstance(shards, list) or len(shards) != manifest["num_shards"]:
        raise ValueError(
            f"{path}: shards must be a list of {manifest['num_shards']} entries"
        )
    for number, shard in enumerate(shards):
        file: Any = shard.get("file_name") if isinstance(shard, dict) else None
        if not isinstance(file, str) or shard.get("shard_id") != number:
            raise ValueError(
                f"{path}: shard {number} must have this shard_id and a file_name, got "
                f"{shard!r}"
            )
        if not file or set(file) & set('/\\:"\0') or file.startswith("."):
            raise ValueError(
                f"{path}: shards must be files of the same folder, got {file!r}"
            )


def _check_records(
    path: pathlib.Path,
    records: np.ndarray,
    shards: tuple[np.ndarray, ...],
    width: int,
    num_taps: int,
) -> None:
    """Every array of every sample lies inside its shard; whole columns at a time."""

    def refuse(is_bad: np.ndarray, rule: str, values: np.ndarray) -> None:
        if np.any(is_bad):
            first = int(np.argmax(is_bad))
            raise ValueError(f"{path}: record {first} {rule}, got {values[first]}")

    numbers = np.arange(len(records), dtype=np.uint64)
    ids = records["sample_id"]
    refuse(ids != numbers, "must have its own number as sample_id", ids)
    shard_ids = records["shard_id"]
    rule = f"must have a shard_id below {len(shards)}"
    refuse(shard_ids >= len(shards), rule, shard_ids)
    lengths = records["length"]
    rule = f"must have 1..{_MOST_TOKENS} tokens"
    refuse((lengths < 1) | (lengths > _MOST_TOKENS), rule, lengths)
    ends = np.asarray([shard.size for shard in shards], np.uint64)[shard_ids]
    bytes_per_token = {
        "tokens": 4,
        "attention_mask": 1,
        "loss_mask": 1,
        "taps": 2 * num_taps * width,
        "hidden": 2 * width,
    }
    for name, per_token in bytes_per_token.items():
        size = lengths.astype(np.uint64) * np.uint64(per_token)
        offsets = records[name]
        is_outside = (offsets > ends) | (size > ends - np.minimum(offsets, ends))
        rule = f"must have its {name} inside a shard"
        refuse(is_outside, rule, offsets)


def _map(path: pathlib.Path) -> np.ndarray:
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing")
    if not path.stat().st_size:
        raise ValueError(f"{path} is empty")
    return np.memmap(path, np.uint8, "r")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
