"""Files of a training run: the whole state for a restart, drafters for use.

A state file holds every array of `TrainState` under its path and a few numbers of the
run, in one safetensors file that appears complete or not at all. Drafters are exported
in DeepSpec's layout, without the embedding and head that are the target's.
"""

import dataclasses
import hashlib
import io
import os
import pathlib
import tarfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax import tensor_files
from dspark_jax.config import DrafterConfig
from dspark_jax.drafters.dspark import DSparkParams
from dspark_jax.interop import deepspec
from dspark_jax.training import target_states
from dspark_jax.training.data import Rows

_RUN = "run/"


def save_state(
    path: str | os.PathLike, state: Any, numbers: dict[str, np.ndarray]
) -> None:
    """Writes a pytree of arrays and the run's numbers, atomically."""
    tensors = {_name(p): x for p, x in jax.tree_util.tree_leaves_with_path(state)}
    run = {_RUN + name: np.asarray(value) for name, value in numbers.items()}
    tensor_files.write(path, {**tensors, **run})


def load_state(path: str | os.PathLike, like: Any) -> tuple[Any, dict[str, np.ndarray]]:
    """Reads what `save_state` wrote into the structure of `like`.

    Raises:
      ValueError: the file's arrays are not those of `like`.
    """
    tensors = tensor_files.read(path)
    numbers = {
        name.removeprefix(_RUN): tensors.pop(name)
        for name in list(tensors)
        if name.startswith(_RUN)
    }
    leaves, treedef = jax.tree_util.tree_flatten_with_path(like)
    shapes = {_name(p): tuple(x.shape) for p, x in leaves}
    found = {name: tuple(x.shape) for name, x in tensors.items()}
    for name in sorted(set(shapes) | set(found)):
        if shapes.get(name) != found.get(name):
            raise ValueError(
                f"{path} is of another run: {name!r} should have shape "
                f"{shapes.get(name)}, it has {found.get(name)}"
            )
    arrays = [jnp.asarray(tensors[_name(p)], x.dtype) for p, x in leaves]
    return jax.tree_util.tree_unflatten(treedef, arrays), numbers


def save_rows(path: str | os.PathLike, rows: Rows) -> None:
    """Writes a corpus, its mask as bits."""
    buffer = io.BytesIO()
    mask = np.asarray(rows.loss_mask)
    np.savez(
        buffer, tokens=np.asarray(rows.tokens), loss_mask=np.packbits(mask, axis=1)
    )
    tensor_files.write_bytes(path, buffer.getvalue())


def load_rows(path: str | os.PathLike) -> Rows:
    """Reads what `save_rows` wrote."""
    with np.load(path, allow_pickle=False) as file:
        tokens, mask = file["tokens"], file["loss_mask"]
    mask = np.unpackbits(mask, axis=1, count=tokens.shape[1]).astype(np.bool_)
    return Rows(tokens=jnp.asarray(tokens), loss_mask=jnp.asarray(mask))


def export(
    folder: str | os.PathLike,
    config: DrafterConfig,
    params: DSparkParams,
    tap_scale: tuple[float, ...] = (),
    dtype: str = "bfloat16",
) -> None:
    """Writes one drafter in DeepSpec's layout, tap factors folded into fc."""
    params = target_states.fold_tap_scale(params, tap_scale)
    params = jax.tree.map(lambda x: x.astype(dtype), params)
    config = dataclasses.replace(config, param_dtype=dtype, compute_dtype=dtype)
    deepspec.save(folder, config, params)


def write_pieces(
    folder: str | os.PathLike,
    files: dict[str, pathlib.Path],
    piece_bytes: int = 15 * 2**20,
) -> int:
    """Packs files into `export.tar.part0, …` of limited size, and a checksum file.

    `cat export.tar.part* | tar x` unpacks them; returns the number of pieces.
    """
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, path in sorted(files.items()):
            archive.add(path, arcname=name)
    data = buffer.getvalue()
    pieces = [data[i : i + piece_bytes] for i in range(0, len(data), piece_bytes)]
    for index, piece in enumerate(pieces):
        tensor_files.write_bytes(folder / f"export.tar.part{index}", piece)
    digest = hashlib.sha256(data).hexdigest()
    text = f"{digest}  export.tar ({len(pieces)} parts)\n"
    tensor_files.write_bytes(folder / "export.tar.sha256", text.encode())
    return len(pieces)


def _name(path: tuple) -> str:
    parts = []
    for entry in path:
        for attribute in ("name", "key", "idx"):
            if hasattr(entry, attribute):
                parts.append(str(getattr(entry, attribute)))
                break
    return "/".join(parts)
