"""Loading a drafter: the shipped one, or a folder in DeepSpec's layout."""

import dataclasses
import importlib.resources
import os
import pathlib
from importlib.resources.abc import Traversable

import jax
import numpy as np

from dspark_jax import layers, tensor_files
from dspark_jax.config import DrafterConfig
from dspark_jax.drafters import dspark
from dspark_jax.interop import deepspec
from dspark_jax.targets import fetch
from dspark_jax.types import Drafter, PyTree, Target

SHIPPED = ("dspark-smollm2-135m",)
VOCABULARY_FILE = "draft_vocabulary.json"


def load_drafter(
    source: str | os.PathLike,
    target: Target,
    *,
    target_params: PyTree | None = None,
    compute_dtype: str | None = None,
    draft_vocabulary: int | None = None,
) -> tuple[Drafter, dspark.DSparkParams]:
    """Loads a drafter for `target` and its parameters.

    Args:
      source: "dspark-smollm2-135m" (shipped with the library), a folder in DeepSpec's
        layout, or a hub name "org/name" (needs the extra `hub`).
      target: the model it drafts for; another one than it was trained for is an error.
      target_params: lets the drafter share tables that equal the target's, and make a
        draft vocabulary.
      compute_dtype: None takes the target's. Parameters stored narrower are widened to
        it once (exactly).
      draft_vocabulary: draft among the n most frequent ids only (an exact economy), as
        the folder's draft_vocabulary.json ranks them; None drafts from all.

    Returns:
      The drafter (static, hashable) and its parameters, on the default device.

    Raises:
      ValueError: a damaged or unsupported folder, or another target.
      FileNotFoundError: no such source, or no draft_vocabulary.json.
    """
    if source in SHIPPED:
        with importlib.resources.as_file(_shipped(str(source))) as folder:
            return _load(folder, target, target_params, compute_dtype, draft_vocabulary)
    path = pathlib.Path(source)
    found = path if path.is_dir() else fetch.from_hub(source)
    if found is None:
        raise FileNotFoundError(
            f"`source` must be one of {', '.join(map(repr, SHIPPED))}, a folder or a "
            f"hub name 'org/name', got {os.fspath(source)!r}"
        )
    if drafters := sorted(found.glob("drafters/*/config.json")):
        raise ValueError(
            f"`source` {os.fspath(source)} is the folder of a training run, name one "
            f"of its drafters: {', '.join(os.fspath(path.parent) for path in drafters)}"
        )
    return _load(found, target, target_params, compute_dtype, draft_vocabulary)


def _shipped_folder(name: str) -> Traversable:
    return importlib.resources.files("dspark_jax") / "weights" / name


def _shipped(name: str) -> Traversable:
    folder = _shipped_folder(name)
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"the shipped drafter {name!r} is missing: {folder}")
    return folder


def _load(
    folder: pathlib.Path,
    target: Target,
    target_params: PyTree | None,
    compute_dtype: str | None,
    draft_vocabulary: int | None,
) -> tuple[Drafter, dspark.DSparkParams]:
    if compute_dtype is None:
        compute_dtype = getattr(target.config, "compute_dtype", None)
    config, params, _ = deepspec.load(
        folder, target, target_params=target_params, compute_dtype=compute_dtype
    )
    config, params = _widened(config, params)
    drafter = dspark.make_drafter(config, target)
    if draft_vocabulary is not None:
        ids = _frequent_ids(folder, draft_vocabulary, config.vocab_size)
        if target_params is None:
            raise ValueError("`draft_vocabulary` needs `target_params`, got None")
        head = deepspec.target_table(deepspec.HEAD, target, target_params)
        params = dspark.with_draft_vocabulary(
            params, target, target_params, ids, head=head
        )
    return drafter, params


def _widened(
    config: DrafterConfig, params: dspark.DSparkParams
) -> tuple[DrafterConfig, dspark.DSparkParams]:
    stored = layers.dtype_of(config.param_dtype)
    wanted = layers.dtype_of(config.compute_dtype)
    if wanted.itemsize <= stored.itemsize:
        return config, params
    # On the host: on the device every shape would compile a program of its own.
    widened = jax.tree.map(
        lambda x: jax.device_put(np.asarray(x).astype(wanted)), params
    )
    return dataclasses.replace(config, param_dtype=config.compute_dtype), widened


def _frequent_ids(folder: pathlib.Path, count: int, vocab_size: int) -> np.ndarray:
    path = folder / VOCABULARY_FILE
    if not path.is_file():
        raise FileNotFoundError(f"`draft_vocabulary` needs {path}, which is missing")
    ids = tensor_files.read_json(path).get("ids")
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise ValueError(f"{path} must hold a list of integers 'ids'")
    if type(count) is not int or not 1 <= count <= len(ids):
        raise ValueError(
            f"`draft_vocabulary` must lie in 1..{len(ids)} (the ids of {path}), got "
            f"{count!r}"
        )
    kept = ids[:count]
    if len(set(kept)) != count or min(kept) < 0 or max(kept) >= vocab_size:
        raise ValueError(
            f"{path}: 'ids' must be distinct and lie in 0..{vocab_size - 1}, got "
            f"{len(set(kept))} distinct ids from {min(kept)} to {max(kept)}"
        )
    return np.asarray(kept, np.int32)
