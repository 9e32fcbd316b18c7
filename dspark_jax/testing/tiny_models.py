"""A random target and a random drafter for it, small enough for quick tests."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.config import BlockConfig, DecoderConfig, DrafterConfig
from dspark_jax.drafters import dspark
from dspark_jax.targets import decoder
from dspark_jax.types import Drafter, PyTree, Target


class TinyModels(NamedTuple):
    """A random target and a random drafter for it."""

    target: Target
    target_params: PyTree
    drafter: Drafter
    drafter_params: PyTree


def make_tiny_models(
    key: jax.Array | None = None,
    *,
    vocab_size: int = 19,
    block_size: int = 3,
    scale: float = 0.4,
    target_fields: dict[str, Any] | None = None,
    drafter_fields: dict[str, Any] | None = None,
) -> TinyModels:
    """A random target of two layers and a random drafter for it, for quick tests.

    >>> models = make_tiny_models(block_size=4)
    >>> models.drafter.config.block_size
    4

    Args:
      key: makes the parameters; None takes a fixed one.
      vocab_size: V.
      block_size: the largest draft length.
      scale: standard deviation of matrices and biases; small ones make words nearly
        uniform.
      target_fields, drafter_fields: fields of the configurations to change.
    """
    block = BlockConfig(
        width=8, num_heads=2, num_kv_heads=1, head_width=4, ffn_width=12
    )
    config = DecoderConfig(
        **{
            "vocab_size": vocab_size,
            "num_layers": 2,
            "block": block,
            "max_position": 64,
            **(target_fields or {}),
        }
    )
    drafter_config = DrafterConfig(
        **{
            "vocab_size": config.vocab_size,
            "num_layers": 1,
            "block": dataclasses.replace(block, width=config.width),
            "max_position": config.max_position,
            "block_size": block_size,
            "mask_token": 1,
            "tap_layers": (0, config.num_layers - 1) if config.num_layers > 1 else (0,),
            "num_target_layers": config.num_layers,
            "markov_rank": 4,
            **(drafter_fields or {}),
        }
    )
    target = decoder.make_target(config)

    words = np.asarray(jax.random.key_data(jax.random.key(0) if key is None else key))
    random = np.random.default_rng(words)

    def draw(path: Any, leaf: Any) -> jax.Array:
        values = random.normal(size=leaf.shape)
        name = str(getattr(path[-1], "name", path[-1]))
        values = 1 + 0.1 * values if name.endswith("norm") else scale * values
        return jnp.asarray(values, leaf.dtype)

    init = functools.partial(jax.tree_util.tree_map_with_path, draw)
    return TinyModels(
        target=target,
        target_params=init(decoder.abstract(config)),
        drafter=dspark.make_drafter(drafter_config, target),
        drafter_params=init(dspark.abstract(drafter_config)),
    )
