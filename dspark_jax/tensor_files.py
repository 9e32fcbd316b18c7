"""Safetensors files and folders: strict to read, atomic to write.

The `safetensors` package checks a file's header (lengths, offsets, dtypes) and nothing
is ever unpickled. Every failure is a ValueError that names the file. This module stands
below targets, drafters and interop, which all read and write the format.
"""

import json
import os
import pathlib
import tempfile
from collections.abc import Iterable, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
FLOATS = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
INTEGERS = {
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
_KNOWN = (*FLOATS.values(), *INTEGERS.values())


def read_folder(folder: str | os.PathLike) -> dict[str, np.ndarray]:
    """Reads all tensors of a Hugging Face folder: one file, or an index and its shards.

    Raises:
      FileNotFoundError: the folder has neither `model.safetensors` nor an index.
      ValueError: a damaged file or an index that does not match its shards.
    """
    folder = pathlib.Path(folder)
    if (folder / SINGLE_FILE).is_file():
        return read(folder / SINGLE_FILE)
    index_path = folder / INDEX_FILE
    if not index_path.is_file():
        raise FileNotFoundError(
            f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}: only safetensors "
            "weights are read"
        )
    shards = _read_index(index_path)
    tensors: dict[str, np.ndarray] = {}
    for shard, names in shards.items():
        found = read(folder / shard)
        for name in sorted(names - set(found)):
            raise ValueError(f"{folder / shard} lacks {name!r}, which the index names")
        for name in sorted(set(found) - names):
            raise ValueError(
                f"{folder / shard} holds {name!r}, which the index does not place there"
            )
        tensors.update(found)
    return tensors


def read(path: str | os.PathLike) -> dict[str, np.ndarray]:
    """Reads one safetensors file into host arrays of the stored dtypes.

    Raises:
      ValueError: a damaged header, or a dtype outside `FLOATS` and `INTEGERS`.
    """
    path = pathlib.Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not a file")
    tensors = {}
    try:
        with safetensors.safe_open(path, framework="np") as file:
            for name in file.keys():  # noqa: SIM118 (it is not a dict)
                stored = file.get_slice(name).get_dtype()
                if stored not in FLOATS and stored not in INTEGERS:
                    raise ValueError(
                        f"{path}: {name!r} has dtype {stored}; supported: "
                        f"{', '.join([*FLOATS, *INTEGERS])}"
                    )
                tensors[name] = file.get_tensor(name)
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} is not a valid safetensors file: {error}") from error
    return tensors


def read_tensor(folder: str | os.PathLike, name: str) -> np.ndarray:
    """Reads one tensor of a Hugging Face folder, nothing else of its shard.

    Raises:
      FileNotFoundError: the folder has neither `model.safetensors` nor an index.
      ValueError: a damaged file, or no such tensor.
    """
    folder = pathlib.Path(folder)
    path = folder / SINGLE_FILE
    if not path.is_file():
        if not (folder / INDEX_FILE).is_file():
            return read_folder(folder)[name]  # says what is missing
        shards = _read_index(folder / INDEX_FILE)
        path = folder / next((s for s, names in shards.items() if name in names), "")
    try:
        with safetensors.safe_open(path, framework="np") as file:
            return file.get_tensor(name)
    except (safetensors.SafetensorError, IsADirectoryError) as error:
        raise ValueError(f"{path} has no readable tensor {name!r}: {error}") from error


def write(
    path: str | os.PathLike,
    tensors: Mapping[str, Any],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes host or device arrays as one safetensors file, atomically.

    The file appears under its name complete or not at all. Metadata defaults to
    `{"format": "pt"}`, which Hugging Face's loaders ask for.
    """
    arrays = {}
    for name, tensor in sorted(tensors.items()):
        array = np.asarray(tensor)
        if array.dtype not in _KNOWN:
            raise ValueError(
                f"{name!r} must be one of {', '.join(d.name for d in _KNOWN)}, got "
                f"{array.dtype}"
            )
        # The package writes memory order; ascontiguousarray alone would turn [] to [1].
        arrays[name] = np.ascontiguousarray(array).reshape(array.shape)
    data = safetensors.numpy.save(arrays, dict(metadata or {"format": "pt"}))
    write_bytes(path, data)


def write_json(path: str | os.PathLike, values: Mapping[str, Any]) -> None:
    """Writes a JSON object as Hugging Face does (sorted, indented), atomically."""
    text = json.dumps(values, indent=2, sort_keys=True) + "\n"
    write_bytes(path, text.encode())


def write_bytes(path: str | os.PathLike, data: bytes) -> None:
    """Writes a file atomically: temporary file in the same folder, fsync, replace."""
    path = pathlib.Path(path)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    temporary = pathlib.Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes private files; a checkpoint gets the usual permissions.
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read_json(path: str | os.PathLike) -> dict[str, Any]:
    """Reads a JSON object; anything else is a ValueError that names the file."""
    path = pathlib.Path(path)
    try:
        values = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(values).__name__}")
    return values


def check_num_layers(num_layers: int, tensors: Mapping[str, Any], where: Any) -> None:
    """Raises ValueError for more layers than tensors, before anything loops."""
    if num_layers > len(tensors):
        raise ValueError(
            f"{where}: {num_layers} layers do not fit {len(tensors)} tensors"
        )


def check_tensors(
    tensors: Mapping[str, np.ndarray],
    expected: Mapping[str, tuple[int, ...]],
    where: str | os.PathLike,
) -> None:
    """Raises ValueError unless exactly the expected float tensors are there.

    Names the first missing, the first unexpected and the first misshapen one.
    """
    problems = []
    missing = _first(name for name in expected if name not in tensors)
    if missing:
        problems.append(f"missing {missing!r}")
    unexpected = _first(name for name in tensors if name not in expected)
    if unexpected:
        problems.append(f"unexpected {unexpected!r}")
    misshapen = _first(
        name
        for name, shape in expected.items()
        if name in tensors and tuple(tensors[name].shape) != tuple(shape)
    )
    if misshapen:
        problems.append(
            f"{misshapen!r} must have shape {tuple(expected[misshapen])}, got "
            f"{tuple(tensors[misshapen].shape)}"
        )
    if not problems:
        integer = _first(
            name for name, x in tensors.items() if x.dtype not in FLOATS.values()
        )
        if integer:
            problems.append(
                f"{integer!r} must be float32, bfloat16 or float16, got "
                f"{tensors[integer].dtype}"
            )
    if problems:
        raise ValueError(f"{where}: {'; '.join(problems)}")


def _read_index(path: pathlib.Path) -> dict[str, set[str]]:
    """Shard -> names of its tensors; shards must lie in the index's own folder."""
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{path} must hold a non-empty object 'weight_map'")
    shards: dict[str, set[str]] = {}
    for name, shard in weight_map.items():
        plain = isinstance(shard, str) and not set(shard) & set('/\\:"\0')
        if not plain or not shard.endswith(".safetensors") or shard.startswith("."):
            raise ValueError(
                f"{path}: shards must be .safetensors files of the same folder, got "
                f"{shard!r} for {name!r}"
            )
        shards.setdefault(shard, set()).add(name)
    for shard in shards:
        if not (path.parent / shard).is_file():
            raise ValueError(f"{path} names {shard!r}, which is not in the folder")
    return shards


def _first(names: Iterable[str]) -> str | None:
    return next(iter(names), None)
