"""DeepSpec's checkpoint layout (config.json + safetensors), both ways.

The layout that SGLang, vLLM and DeepSpec load. Keys of config.json that this library
does not use are kept as `extra_config` and written back, so that a round trip loses
nothing; `deepspec_config` translates the others. Matrices are [out, in] in the file.
"""

import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax import layers, tensor_files
from dspark_jax.config import DrafterConfig
from dspark_jax.drafters import backbone, confidence, markov
from dspark_jax.drafters.dspark import DSparkParams
from dspark_jax.interop import deepspec_config
from dspark_jax.targets import load as load_lib
from dspark_jax.targets.decoder import DecoderParams
from dspark_jax.types import PyTree, Target

EMBED, HEAD = "embed_tokens.weight", "lm_head.weight"
_PROJECTIONS = {"gated": "gate_proj", "rnn": "joint_proj"}


def load(
    folder: str | os.PathLike,
    target: Target | None = None,
    *,
    target_params: PyTree | None = None,
    compute_dtype: str | None = None,
) -> tuple[DrafterConfig, DSparkParams, dict[str, Any]]:
    """Reads a drafter's folder.

    Args:
      folder: config.json and model.safetensors (or an index and shards).
      target: needed with `target_params` only.
      target_params: `embed` and `head` equal to the target's, bit for bit, become None:
        the drafter then uses the target's. Otherwise they are kept when present.
      compute_dtype: None takes the file's dtype.

    Returns:
      The configuration, the parameters on the default device, and the keys of
      config.json that the configuration does not hold.

    Raises:
      ValueError: a setting that is missing or not supported, or tensors that don't fit.
      FileNotFoundError: no config.json or weights.
    """
    folder = pathlib.Path(folder)
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{folder} has no config.json")
    values = tensor_files.read_json(folder / "config.json")
    where = str(folder / "config.json")
    config = deepspec_config.drafter_config(
        values, where=where, compute_dtype=compute_dtype
    )
    tensors = tensor_files.read_folder(folder)
    tensor_files.check_num_layers(config.num_layers, tensors, folder)
    tensor_files.check_tensors(tensors, _expected(config, tensors), folder)
    for name, tensor in tensors.items():
        if tensor.dtype != layers.dtype_of(config.param_dtype):
            raise ValueError(
                f"{folder}: {name!r} must have the config's dtype "
                f"{config.param_dtype}, got {tensor.dtype}"
            )
    if target is not None and target_params is not None:
        _drop_target_tables(tensors, target, target_params)
    return config, _params(config, tensors), deepspec_config.extra(values)


def save(
    folder: str | os.PathLike,
    config: DrafterConfig,
    params: DSparkParams,
    *,
    extra_config: Mapping[str, Any] | None = None,
    embed: jax.Array | None = None,
    head: jax.Array | None = None,
) -> None:
    """Writes a drafter's folder; each file appears complete or not at all.

    Args:
      folder: made if need be.
      extra_config: further keys of config.json, those that `load` returned.
      embed: [V, D], written as embed_tokens when the parameters have none of their own.
      head: [V, D], written as lm_head likewise. DeepSpec's own layout has both.

    Raises:
      ValueError: a configuration that the layout cannot express.
    """
    values = deepspec_config.config_json(config, extra_config)
    tensors = _tensors(config, params)
    for name, own, given in (
        (EMBED, params.embed, embed),
        (HEAD, params.head, head),
    ):
        table = given if own is None else own
        if table is not None:
            tensors[name] = np.asarray(table)
    dtype = layers.dtype_of(config.param_dtype)
    tensors = {name: x.astype(dtype, copy=False) for name, x in tensors.items()}
    folder = pathlib.Path(folder)
    tensor_files.check_tensors(tensors, _expected(config, tensors), folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensor_files.write(folder / tensor_files.SINGLE_FILE, tensors)
    tensor_files.write_json(folder / "config.json", values)


def expected_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor but the two optional tables."""
    width, rank, taps = config.width, config.markov_rank, len(config.tap_layers)
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (width, taps * width),
        "hidden_norm.weight": (width,),
        "norm.weight": (width,),
    }
    for layer in range(config.num_layers):
        shapes |= load_lib.block_shapes(config.block, f"layers.{layer}.")
    if config.markov_kind != "none":
        shapes["markov_head.markov_w1.weight"] = (config.vocab_size, rank)
        shapes["markov_head.markov_w2.weight"] = (config.vocab_size, rank)
    if config.markov_kind in _PROJECTIONS:
        name = f"markov_head.{_PROJECTIONS[config.markov_kind]}"
        rows = rank if config.markov_kind == "gated" else 3 * rank
        columns = width + (rank if config.markov_kind == "gated" else 2 * rank)
        shapes |= {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}
    if config.confidence_kind != "none":
        size = width + (rank if config.confidence_kind == "markov" else 0)
        shapes["confidence_head.proj.weight"] = (1, size)
        shapes["confidence_head.proj.bias"] = (1,)
    return shapes


def target_table(name: str, target: Target, target_params: PyTree) -> jax.Array:
    """The target's EMBED or HEAD table [V, D]."""
    if isinstance(target_params, DecoderParams):
        table = target_params.head if name == HEAD else None
        table = target_params.embed if table is None else table
        return table[: target.config.vocab_size]
    if name == EMBED:
        ids = jnp.arange(target.config.vocab_size, dtype=jnp.int32)
        return target.embed(target_params, ids)
    # Another target's head is only known as a linear function: apply it to the basis.
    return target.unembed(target_params, jnp.eye(target.config.width)).T


def _expected(
    config: DrafterConfig, tensors: Mapping[str, np.ndarray]
) -> dict[str, tuple[int, ...]]:
    table = (config.vocab_size, config.width)
    present = [name for name in (EMBED, HEAD) if name in tensors]
    return {**expected_shapes(config), **dict.fromkeys(present, table)}


def _params(config: DrafterConfig, tensors: Mapping[str, np.ndarray]) -> DSparkParams:
    dtype = layers.dtype_of(config.param_dtype)

    def array(name: str) -> jax.Array:
        return load_lib.to_device(tensors[name], dtype)

    markov_params = confidence_params = None
    if config.markov_kind != "none":
        projection = _PROJECTIONS.get(config.markov_kind)
        name = f"markov_head.{projection}"
        markov_params = markov.MarkovParams(
            w1=array("markov_head.markov_w1.weight"),
            w2=array("markov_head.markov_w2.weight"),
            projection=array(f"{name}.weight") if projection else None,
            projection_bias=array(f"{name}.bias") if projection else None,
        )
    if config.confidence_kind != "none":
        confidence_params = confidence.ConfidenceParams(
            weight=load_lib.to_device(tensors["confidence_head.proj.weight"][0], dtype),
            bias=load_lib.to_device(tensors["confidence_head.proj.bias"][0], dtype),
        )
    return DSparkParams(
        backbone=backbone.BackboneParams(
            fc=array("fc.weight"),
            hidden_norm=array("hidden_norm.weight"),
            layers=tuple(
                load_lib.block_params(config.block, tensors, f"layers.{layer}.", dtype)
                for layer in range(config.num_layers)
            ),
            final_norm=array("norm.weight"),
        ),
        markov=markov_params,
        confidence=confidence_params,
        embed=array(EMBED) if EMBED in tensors else None,
        head=array(HEAD) if HEAD in tensors else None,
    )


def _tensors(config: DrafterConfig, params: DSparkParams) -> dict[str, np.ndarray]:
    """All tensors but the two tables, as in the file; the inverse of `_params`."""
    body = params.backbone
    tensors = {
        "fc.weight": np.asarray(body.fc),
        "hidden_norm.weight": np.asarray(body.hidden_norm),
        "norm.weight": np.asarray(body.final_norm),
    }
    for layer, block in enumerate(body.layers):
        tensors |= load_lib.block_tensors(config.block, block, f"layers.{layer}.")
    if params.markov is not None:
        tensors["markov_head.markov_w1.weight"] = np.asarray(params.markov.w1)
        tensors["markov_head.markov_w2.weight"] = np.asarray(params.markov.w2)
        if params.markov.projection is not None:
            name = f"markov_head.{_PROJECTIONS[config.markov_kind]}"
            tensors[f"{name}.weight"] = np.asarray(params.markov.projection)
            tensors[f"{name}.bias"] = np.asarray(params.markov.projection_bias)
    if params.confidence is not None:
        weight = np.asarray(params.confidence.weight)
        tensors["confidence_head.proj.weight"] = weight[None]
        tensors["confidence_head.proj.bias"] = np.asarray(params.confidence.bias)[None]
    return tensors


def _drop_target_tables(
    tensors: dict[str, np.ndarray], target: Target, target_params: PyTree
) -> None:
    """Removes the tables that equal the target's, bit for bit."""
    for name in (EMBED, HEAD):
        if name in tensors:
            theirs = target_table(name, target, target_params)
            # float32 holds every value of the narrower dtypes.
            ours = tensors[name].astype(np.float32)
            if np.array_equal(ours, np.asarray(theirs).astype(np.float32)):
                del tensors[name]
