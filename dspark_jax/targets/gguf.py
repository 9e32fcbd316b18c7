"""A small, safe reader of GGUF v3 files: metadata and dequantised tensors.

Numpy only; `gguf_llama` says what they mean. The file is mapped; every length and
offset is checked against the file's size first, nested arrays are
refused (so nothing recurses), and tensors are dequantised to float32 exactly as the
format defines them.
"""

import dataclasses
import math
import os
import pathlib
import struct
from typing import Any

import numpy as np

MAX_ENTRIES = 65_536  # metadata keys, and tensors
MAX_STRING = 1 << 24  # bytes of one string
MAX_ARRAY = 1 << 24  # items of one metadata array
MAX_ALIGNMENT = 1 << 16
_SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "|b1",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_STRING, _ARRAY = 8, 9
_ALIGNMENT = 64
# Tensor types: name, values of a block, bytes of a block.
_TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    8: ("Q8_0", 32, 34),
    30: ("BF16", 1, 2),
}


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies and how it is stored; shape in numpy order."""

    kind: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int


@dataclasses.dataclass(frozen=True)
class GgufFile:
    """The header of a GGUF file; `tensor` reads one of its tensors."""

    path: pathlib.Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]


def read(path: str | os.PathLike) -> GgufFile:
    """Reads the header: metadata and the table of tensors.

    Raises:
      ValueError: not GGUF v3, truncated, or a length, offset or type out of bounds.
    """
    path = pathlib.Path(path)
    if path.stat().st_size < 24:
        raise ValueError(f"{path} is not a GGUF file: {path.stat().st_size} bytes")
    cursor = _Cursor(path, np.memmap(path, np.uint8, mode="r"))
    magic, version = cursor.take(4), cursor.scalar("<u4")
    if magic != b"GGUF":
        raise ValueError(f"{path} is not a GGUF file: it begins with {magic!r}")
    if version != 3:
        raise ValueError(f"{path}: GGUF version must be 3, got {version}")
    num_tensors = cursor.count("number of tensors", MAX_ENTRIES)
    num_entries = cursor.count("number of metadata entries", MAX_ENTRIES)
    metadata: dict[str, Any] = {}
    for _ in range(num_entries):
        key = cursor.string()
        if key in metadata:
            raise ValueError(f"{path}: metadata key {key!r} occurs twice")
        metadata[key] = _value(cursor, key)
    alignment = metadata.get("general.alignment", 32)
    is_known = type(alignment) is int and 8 <= alignment <= MAX_ALIGNMENT
    if not is_known or alignment & (alignment - 1):
        raise ValueError(
            f"{path}: general.alignment must be a power of two in 8..{MAX_ALIGNMENT}, "
            f"got {alignment!r}"
        )
    entries = [_tensor_entry(cursor) for _ in range(num_tensors)]
    begin = -(-cursor.offset // alignment) * alignment
    return GgufFile(
        path, metadata, _place(path, entries, begin, alignment, cursor.size)
    )


def tensor(file: GgufFile, name: str) -> np.ndarray:
    """One tensor, dequantised to float32, in a new array.

    Raises:
      ValueError: no such tensor, or a value that is not finite.
    """
    if name not in file.tensors:
        raise ValueError(f"{file.path}: missing tensor {name!r}")
    info = file.tensors[name]
    raw = np.memmap(
        file.path, np.uint8, mode="r", offset=info.start, shape=(info.num_bytes,)
    )
    with np.errstate(invalid="ignore"):  # Found out below.
        values, decisive = _dequantise(info.kind, np.asarray(raw))
    if not np.isfinite(decisive).all():
        raise ValueError(
            f"{file.path}: tensor {name!r} holds values that are not finite"
        )
    return values.reshape(info.shape)


def empty(shape: tuple[int, ...]) -> np.ndarray:
    """A new float32 array, aligned such that JAX takes it over on a CPU, uncopied."""
    num_bytes = math.prod(shape) * 4
    raw = np.empty(num_bytes + _ALIGNMENT, np.uint8)
    begin = -raw.ctypes.data % _ALIGNMENT
    return raw[begin : begin + num_bytes].view(np.float32).reshape(shape)


class _Cursor:
    """Reads a mapped file from front to back, never beyond its end."""

    def __init__(self, path: pathlib.Path, data: np.ndarray):
        self.path = path
        self.data = data.data
        self.size = len(self.data)
        self.offset = 0

    def take(self, count: int) -> bytes:
        end = self.offset + count
        if end > self.size:
            raise ValueError(
                f"{self.path} is truncated: {count} bytes wanted at {self.offset}, the "
                f"file has {self.size}"
            )
        chunk = bytes(self.data[self.offset : end])
        self.offset = end
        return chunk

    def scalar(self, kind: str) -> Any:
        dtype = np.dtype(kind)
        return np.frombuffer(self.take(dtype.itemsize), dtype)[0].item()

    def count(self, what: str, limit: int) -> int:
        value = struct.unpack("<Q", self.take(8))[0]
        if value > limit:
            raise ValueError(
                f"{self.path}: {what} must be at most {limit}, got {value}"
            )
        return value

    def string(self) -> str:
        raw = self.take(self.count("length of a string", MAX_STRING))
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"{self.path}: a string is not UTF-8: {error}") from error


def _value(cursor: _Cursor, key: str) -> Any:
    kind = cursor.scalar("<u4")
    if kind == _STRING:
        return cursor.string()
    if kind in _SCALARS:
        return cursor.scalar(_SCALARS[kind])
    if kind != _ARRAY:
        raise ValueError(f"{cursor.path}: {key!r} has unknown value type {kind}")
    item = cursor.scalar("<u4")
    length = cursor.count(f"length of {key!r}", MAX_ARRAY)
    if item == _STRING:
        return [cursor.string() for _ in range(length)]
    if item in _SCALARS:
        dtype = np.dtype(_SCALARS[item])
        return np.frombuffer(cursor.take(length * dtype.itemsize), dtype).tolist()
    raise ValueError(f"{cursor.path}: {key!r} is an array of unsupported type {item}")


def _tensor_entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.string()
    rank = cursor.scalar("<u4")
    if not 1 <= rank <= 4:
        raise ValueError(f"{cursor.path}: {name!r} must have 1 to 4 axes, got {rank}")
    shape = tuple(struct.unpack("<Q", cursor.take(8))[0] for _ in range(rank))
    # The format counts axes from the innermost one.
    return name, shape[::-1], cursor.scalar("<u4"), cursor.scalar("<u8")


def _place(
    path: pathlib.Path, entries: list, begin: int, alignment: int, size: int
) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for name, shape, kind, offset in entries:
        if name in tensors:
            raise ValueError(f"{path}: tensor {name!r} occurs twice")
        if kind not in _TYPES:
            known = ", ".join(known for known, _, _ in _TYPES.values())
            raise ValueError(
                f"{path}: {name!r} has tensor type {kind}; supported: {known}"
            )
        label, block_values, block_bytes = _TYPES[kind]
        if min(shape) < 1 or shape[-1] % block_values:
            raise ValueError(
                f"{path}: {name!r} of type {label} must have rows of a positive "
                f"multiple of {block_values} values, got shape {shape}"
            )
        num_bytes = math.prod(shape) // block_values * block_bytes
        if offset % alignment or begin + offset + num_bytes > size:
            raise ValueError(
                f"{path}: {name!r} must lie within the file's {size} bytes, aligned to "
                f"{alignment}, got {num_bytes} bytes at {begin} + {offset}"
            )
        tensors[name] = TensorInfo(label, shape, begin + offset, num_bytes)
    end, before = begin, ""
    for name, info in sorted(tensors.items(), key=lambda item: item[1].start):
        if info.start < end:
            raise ValueError(f"{path}: tensors {before!r} and {name!r} overlap")
        end, before = info.start + info.num_bytes, name
    return tensors


def _dequantise(kind: str, raw: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The values, and numbers that are finite if and only if all values are.

    (A block's values are at most 127 float16 scales and a float16 minimum: finite in
    float32 if these are.)
    """
    block_values, block_bytes = next(
        (v, b) for name, v, b in _TYPES.values() if name == kind
    )
    values = empty((len(raw) // block_bytes, block_values))
    if block_values == 1:
        if kind == "BF16":
            raw = (raw.view("<u2").astype(np.uint32) << 16).view(np.uint8)
        values[:, 0] = raw.view("<f2" if kind == "F16" else "<f4")
        return values, values
    blocks = raw.reshape(-1, block_bytes)
    scale = blocks[:, :2].copy().view("<f2").astype(np.float32)  # [blocks, 1]
    if kind == "Q8_0":
        np.multiply(blocks[:, 2:].view(np.int8), scale, out=values)
        return values, scale
    if kind == "Q4_0":
        packed = blocks[:, 2:]
        # The low halves are a block's first 16 values.
        np.subtract(packed & 15, np.float32(8), out=values[:, :16])
        np.subtract(packed >> 4, np.float32(8), out=values[:, 16:])
        values *= scale
        return values, scale
    packed = blocks[:, 4:]
    np.multiply(packed & 15, scale, out=values[:, :16])
    np.multiply(packed >> 4, scale, out=values[:, 16:])
    minimum = blocks[:, 2:4].copy().view("<f2").astype(np.float32)
    values += minimum
    return values, np.stack([scale, minimum])
