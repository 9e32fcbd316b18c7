"""Loading a target: the embedded default, a Hugging Face folder or a GGUF file.

All sources come down to a `DecoderConfig` and tensors under Hugging Face names, which
are checked against the configuration and put on the default
device once. The fingerprint names the model, not the file: a GGUF, a bfloat16 and a
float32 copy of one model have the same.
"""

import dataclasses
import hashlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np

from dspark_jax import layers, tensor_files
from dspark_jax.config import Attention, BlockConfig, DecoderConfig
from dspark_jax.targets import decoder, fetch, files
from dspark_jax.types import Target

# Our field and its Hugging Face names, more than one where our matrix joins theirs.
BLOCK_NAMES = {
    "input_norm": ("input_layernorm.weight",),
    "qkv": (
        "self_attn.q_proj.weight",
        "self_attn.k_proj.weight",
        "self_attn.v_proj.weight",
    ),
    "o": ("self_attn.o_proj.weight",),
    "post_norm": ("post_attention_layernorm.weight",),
    "gate_up": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "down": ("mlp.down_proj.weight",),
    "q_norm": ("self_attn.q_norm.weight",),
    "k_norm": ("self_attn.k_norm.weight",),
    "qkv_bias": (
        "self_attn.q_proj.bias",
        "self_attn.k_proj.bias",
        "self_attn.v_proj.bias",
    ),
    "o_bias": ("self_attn.o_proj.bias",),
    "gate_up_bias": ("mlp.gate_proj.bias", "mlp.up_proj.bias"),
    "down_bias": ("mlp.down_proj.bias",),
}


def load_target(
    source: str | os.PathLike,
    *,
    param_dtype: str | None = "float32",
    compute_dtype: str | None = None,
    attention: Attention = "auto",
) -> tuple[Target, decoder.DecoderParams]:
    """Loads a target model and its parameters.

    Args:
      source: "smollm2-135m" (the embedded default), a Hugging Face folder, a .gguf
        file, or a hub name "org/name" (needs the extra `hub`).
      param_dtype: dtype of the parameters; None keeps the file's (float32 for GGUF).
      compute_dtype: dtype of the matrix products; None takes `param_dtype`.
      attention: how its caches, and its drafter's, are attended (`DecoderConfig`).

    Returns:
      The target (static, hashable) and its parameters, on the default device.

    Raises:
      ValueError: a damaged file, tensors that do not fit, or an unsupported field.
      FileNotFoundError: no such source.
    """
    host = files.read(fetch.locate(source), param_dtype, compute_dtype)
    return from_host(host, attention)


def from_host(
    host: files.HostTarget, attention: Attention = "auto"
) -> tuple[Target, decoder.DecoderParams]:
    """The target of files that were read; its parameters on the default device.

    Raises:
      ValueError: tensors that do not fit the configuration.
    """
    path, config, tensors = host
    tensor_files.check_num_layers(config.num_layers, tensors, path)
    tensor_files.check_tensors(tensors, expected_shapes(config), path)
    config = dataclasses.replace(
        config,
        fingerprint=fingerprint(config, tensors["model.norm.weight"]),
        attention=attention,
    )
    return decoder.make_target(config), _params(config, tensors)


def load_config(source: str | os.PathLike) -> DecoderConfig:
    """The configuration of a target, fingerprint included, without its parameters.

    Raises:
      ValueError, FileNotFoundError: as `load_target`.
    """
    path = fetch.locate(source)
    if path.is_dir():
        config = files.folder_config(path, None, None)
        norm = tensor_files.read_tensor(path, "model.norm.weight")
    else:
        _, config, tensors = files.read(path, None, None)
        norm = tensors["model.norm.weight"]
    return dataclasses.replace(config, fingerprint=fingerprint(config, norm))


def fingerprint(config: DecoderConfig, final_norm: np.ndarray) -> str:
    """16 hex digits that name a model: its sizes, and its final norm in bfloat16."""
    block = config.block
    sizes = (
        config.vocab_size,
        config.width,
        config.num_layers,
        block.num_heads,
        block.num_kv_heads,
        block.head_width,
        block.ffn_width,
    )
    digest = hashlib.sha256(np.asarray(sizes, "<i8").tobytes())
    rounded = np.asarray(final_norm).astype(np.float32).astype(ml_dtypes.bfloat16)
    digest.update(rounded.view("<u2").tobytes())
    return digest.hexdigest()[:16]


def expected_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Hugging Face name -> shape of every tensor that the configuration has."""
    table = (config.vocab_size, config.width)
    shapes = {
        "model.embed_tokens.weight": table,
        "model.norm.weight": (config.width,),
    }
    if not config.tied_embeddings:
        shapes["lm_head.weight"] = table
    for layer in range(config.num_layers):
        shapes |= block_shapes(config.block, f"model.layers.{layer}.")
    return shapes


def block_shapes(config: BlockConfig, prefix: str) -> dict[str, tuple[int, ...]]:
    """Hugging Face name -> shape of one block's tensors."""
    abstract = layers.abstract_block(config, np.float32)
    return {
        prefix + name: (rows, *getattr(abstract, field).shape[1:])
        for field, names in BLOCK_NAMES.items()
        if getattr(abstract, field) is not None
        for name, rows in zip(names, _rows(config, abstract, field), strict=True)
    }


def block_params(
    config: BlockConfig, tensors: Mapping[str, np.ndarray], prefix: str, dtype: np.dtype
) -> layers.BlockParams:
    """One block from Hugging Face tensors, on the default device."""
    abstract = layers.abstract_block(config, dtype)
    return layers.BlockParams(
        **{
            field: to_device(
                _joined([tensors[prefix + n] for n in names], dtype), dtype
            )
            for field, names in BLOCK_NAMES.items()
            if getattr(abstract, field) is not None
        }
    )


def block_tensors(
    config: BlockConfig, params: layers.BlockParams, prefix: str
) -> dict[str, np.ndarray]:
    """One block as Hugging Face tensors; the inverse of `block_params`."""
    tensors = {}
    for field, names in BLOCK_NAMES.items():
        if getattr(params, field) is not None:
            array = np.asarray(getattr(params, field))
            ends = np.cumsum(_rows(config, params, field))
            for name, part in zip(names, np.split(array, ends[:-1]), strict=True):
                tensors[prefix + name] = part
    return tensors


def _rows(config: BlockConfig, params: layers.BlockParams, field: str) -> Any:
    """Rows of each of a field's tensors."""
    sizes = layers.projection_sizes(config)
    return sizes.get(field.removesuffix("_bias"), getattr(params, field).shape[:1])


def _joined(parts: Sequence[np.ndarray], dtype: np.dtype) -> np.ndarray:
    if len(parts) == 1:
        return parts[0]
    # Each by itself first: parts of two 16-bit types have no common one.
    return np.concatenate([part.astype(dtype, copy=False) for part in parts])


def to_device(array: np.ndarray, dtype: np.dtype) -> jax.Array:
    """The array on the default device; converted and laid out on the host, once."""
    converted = np.ascontiguousarray(array.astype(dtype, copy=False))
    return jax.device_put(converted.reshape(array.shape))


def _params(
    config: DecoderConfig, tensors: Mapping[str, np.ndarray]
) -> decoder.DecoderParams:
    dtype = layers.dtype_of(config.param_dtype)
    return decoder.DecoderParams(
        embed=to_device(tensors["model.embed_tokens.weight"], dtype),
        layers=tuple(
            block_params(config.block, tensors, f"model.layers.{layer}.", dtype)
            for layer in range(config.num_layers)
        ),
        final_norm=to_device(tensors["model.norm.weight"], dtype),
        head=None
        if config.tied_embeddings
        else to_device(tensors["lm_head.weight"], dtype),
    )
