"""A target's files as a `DecoderConfig` and host tensors under Hugging Face names.

Needs no JAX: the command line reads while JAX is still being imported. What the tensors
must be is checked by `load.from_host`, which puts them on the device.
"""

import dataclasses
import pathlib
from typing import NamedTuple

import numpy as np

from dspark_jax import tensor_files
from dspark_jax.config import DecoderConfig
from dspark_jax.targets import gguf, gguf_llama, hf_config


class HostTarget(NamedTuple):
    """What a folder or a GGUF file holds."""

    path: pathlib.Path
    config: DecoderConfig
    tensors: dict[str, np.ndarray]


def read(
    path: pathlib.Path, param_dtype: str | None, compute_dtype: str | None = None
) -> HostTarget:
    """Reads a Hugging Face folder or a GGUF file; dtypes as in `load_target`.

    Raises:
      ValueError: a damaged file, or an unsupported field.
      FileNotFoundError: a folder without config.json or weights.
    """
    if path.is_dir():
        return _read_folder(path, param_dtype, compute_dtype)
    return read_gguf(gguf.read(path), param_dtype, compute_dtype)


def read_gguf(
    file: gguf.GgufFile, param_dtype: str | None, compute_dtype: str | None = None
) -> HostTarget:
    """The target of a GGUF file whose header was read."""
    config = gguf_llama.decoder_config(file)
    param_dtype = param_dtype or "float32"
    config = dataclasses.replace(
        config, param_dtype=param_dtype, compute_dtype=compute_dtype or param_dtype
    )
    return HostTarget(file.path, config, gguf_llama.hf_tensors(file, config))


def folder_config(
    folder: pathlib.Path, param_dtype: str | None, compute_dtype: str | None = None
) -> DecoderConfig:
    """The configuration of a Hugging Face folder, without its fingerprint."""
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} has no config.json")
    return hf_config.decoder_config(
        tensor_files.read_json(path),
        where=str(path),
        generation=hf_config.read_generation_config(folder),
        param_dtype=param_dtype,
        compute_dtype=compute_dtype,
    )


def _read_folder(
    folder: pathlib.Path, param_dtype: str | None, compute_dtype: str | None
) -> HostTarget:
    config = folder_config(folder, param_dtype, compute_dtype)
    tensors = tensor_files.read_folder(folder)
    # Buffers of old checkpoints, recomputed from the configuration.
    tensors = {k: v for k, v in tensors.items() if not k.endswith(".inv_freq")}
    head = tensors.get("lm_head.weight")
    if config.tied_embeddings and head is not None:
        embed = tensors.get("model.embed_tokens.weight")
        if embed is None or not np.array_equal(head, embed):
            raise ValueError(
                f"{folder}: lm_head.weight must equal model.embed_tokens.weight when "
                "tie_word_embeddings is true"
            )
        del tensors["lm_head.weight"]
    return HostTarget(folder, config, tensors)
