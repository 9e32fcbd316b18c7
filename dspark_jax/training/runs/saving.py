"""Files of a training run: checkpoints for a restart, the corpus, drafters for use.

A checkpoint holds every array of a state; orbax writes it under a temporary name and
renames it, so that it is there complete or not at all. Drafters are exported in
DeepSpec's layout, without the embedding and head that are the target's.
"""

import dataclasses
import io
import os
import pathlib
import zipfile
from types import TracebackType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from orbax.checkpoint import v1 as ocp

from dspark_jax import tensor_files
from dspark_jax.config import DrafterConfig
from dspark_jax.drafters.dspark import DSparkParams
from dspark_jax.interop import deepspec
from dspark_jax.training import target_states
from dspark_jax.training.texts.data import Rows
from dspark_jax.types import PyTree


class Checkpoints:
    """The checkpoints of a run, by step; a context manager that waits for the last one.

    Args:
      folder: made if need be.
      keep_last: as many of the newest ones stay.
      keep_every: those at multiples of it stay too.
    """

    def __init__(
        self,
        folder: str | os.PathLike,
        *,
        keep_last: int = 2,
        keep_every: int | None = None,
    ):
        self.folder = pathlib.Path(folder).absolute()
        policies = ocp.training.preservation_policies
        kept: list[Any] = [policies.LatestN(keep_last)]
        if keep_every is not None:
            kept.append(policies.EveryNSteps(keep_every))
        self._checkpointer = ocp.training.Checkpointer(
            self.folder,
            # When to save is decided by the loop.
            save_decision_policy=ocp.training.save_decision_policies.FixedIntervalPolicy(
                1
            ),
            preservation_policy=policies.AnyPreservationPolicy(kept),
            cleanup_tmp_directories=True,
        )

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._checkpointer.close()

    @property
    def steps(self) -> tuple[int, ...]:
        """Steps of the complete checkpoints, ascending."""
        return tuple(int(found.step) for found in self._checkpointer.checkpoints)

    def save(self, step: int, state: PyTree) -> None:
        """Copies the state to the host and writes it in the background.

        The copy is made first: a step may overwrite the state (donation) at once.
        """
        self._checkpointer.wait()
        copy = jax.tree.map(lambda x: np.array(x, copy=True), state)
        self._checkpointer.save_async(step, copy)

    def wait(self) -> None:
        """Returns when the last checkpoint is complete."""
        self._checkpointer.wait()

    def load(self, step: int, like: PyTree) -> PyTree:
        """Reads a checkpoint.

        Args:
          like: arrays or `jax.ShapeDtypeStruct`s with shardings: what is wanted.

        Raises:
          ValueError: the checkpoint holds other arrays.
        """
        self._checkpointer.wait()
        stored = self._checkpointer.metadata(step).metadata
        found, wanted = _shapes(stored), _shapes(like)
        for name in sorted(found.keys() | wanted.keys()):
            if found.get(name) != wanted.get(name):
                raise ValueError(
                    f"{self.folder / str(step)} is of another run: {name!r} should be "
                    f"{wanted.get(name)}, it is {found.get(name)}"
                )
        return self._checkpointer.load(step, like)


def save_rows(path: str | os.PathLike, rows: Rows, num_batches: int) -> None:
    """Writes a corpus, its mask as bits, and how many batches it was written in."""
    buffer = io.BytesIO()
    mask = np.asarray(rows.loss_mask)
    np.savez(
        buffer,
        tokens=np.asarray(rows.tokens),
        loss_mask=np.packbits(mask, axis=1),
        num_batches=np.int64(num_batches),
    )
    tensor_files.write_bytes(path, buffer.getvalue())


def load_rows(path: str | os.PathLike) -> tuple[Rows, int]:
    """Reads what `save_rows` wrote, into host arrays.

    Raises:
      ValueError: a damaged file, or arrays that are no corpus.
    """
    try:
        with open(path, "rb") as raw, np.load(raw, allow_pickle=False) as file:
            tokens, bits = file["tokens"], file["loss_mask"]
            num_batches = int(file["num_batches"])
    except (ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is not a corpus of rows: {error}") from error
    is_corpus = (
        tokens.ndim == 2
        and tokens.dtype in (np.uint16, np.int32)
        and bits.dtype == np.uint8
        and bits.shape == (tokens.shape[0], -(-tokens.shape[1] // 8))
    )
    if not is_corpus:
        raise ValueError(
            f"{path} is not a corpus of rows: tokens are {tokens.dtype} "
            f"{tokens.shape}, the mask's bits {bits.dtype} {bits.shape}"
        )
    mask: Any = np.unpackbits(bits, axis=1, count=tokens.shape[1]).astype(np.bool_)
    return Rows(tokens=tokens, loss_mask=mask), num_batches


def export(
    folder: str | os.PathLike,
    config: DrafterConfig,
    params: DSparkParams,
    tap_scale: tuple[float, ...] = (),
    dtype: str = "bfloat16",
) -> None:
    """Writes one drafter in DeepSpec's layout, tap factors folded into fc."""
    params = jax.tree.map(jnp.asarray, jax.device_get(params))  # off the mesh
    params = target_states.fold_tap_scale(params, tap_scale)
    params = jax.tree.map(lambda x: x.astype(dtype), params)
    config = dataclasses.replace(config, param_dtype=dtype, compute_dtype=dtype)
    deepspec.save(folder, config, params)


def _shapes(tree: PyTree) -> dict[str, str]:
    """Dtype and shape by path, of a state or of what orbax says of one."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {
        _name(path): f"{np.dtype(leaf.dtype).name} {tuple(leaf.shape)}"
        for path, leaf in leaves
    }


def _name(path: tuple) -> str:
    parts = []
    for entry in path:
        for attribute in ("name", "key", "idx"):
            if hasattr(entry, attribute):
                parts.append(str(getattr(entry, attribute)))
                break
    return "/".join(parts)
