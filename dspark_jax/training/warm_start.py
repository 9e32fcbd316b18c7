"""Starting from a drafter that exists: its backbone, and the heads that it has.

A Markov or confidence head for a published DFlash drafter begins this way (together
with `trainable = "heads"`), and so does a second stage of training.
"""

import dataclasses
import os

import jax
import jax.numpy as jnp

from dspark_jax.config import DrafterConfig
from dspark_jax.drafters.dspark import DSparkParams
from dspark_jax.interop import deepspec
from dspark_jax.training import target_states

_SAME = ("vocab_size", "num_layers", "block", "mask_token", "tap_layers")


def load(
    folder: str | os.PathLike,
    config: DrafterConfig,
    fresh: DSparkParams,
    tap_scale: tuple[float, ...] = (),
) -> DSparkParams:
    """Float32 parameters of the folder; heads that it lacks are those of `fresh`.

    Args:
      folder: DeepSpec's layout.
      config: of the drafter to train.
      fresh: step 0 of the same drafter without a warm start.
      tap_scale: as in `TrainConfig`; the folder's fc is of the raw taps.

    Raises:
      ValueError: a backbone of other shapes or conventions, or of another target.
      FileNotFoundError: no drafter in the folder.
    """
    found, params, _ = deepspec.load(folder)
    for name in _SAME:
        theirs, ours = getattr(found, name), getattr(config, name)
        if theirs != ours:
            raise ValueError(
                f"init_from: {os.fspath(folder)} has {name} = {theirs}, the drafter to "
                f"train has {ours}"
            )
    fingerprints = found.target_fingerprint, config.target_fingerprint
    if all(fingerprints) and fingerprints[0] != fingerprints[1]:
        raise ValueError(
            f"init_from: {os.fspath(folder)} was trained for another target "
            f"({fingerprints[0]}, not {fingerprints[1]})"
        )
    params = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    body = dataclasses.replace(fresh, backbone=params.backbone)
    if tap_scale:
        inverse = tuple(1 / factor for factor in tap_scale)
        body = target_states.fold_tap_scale(body, inverse)
    markov, confidence = fresh.markov, fresh.confidence
    if (found.markov_kind, found.markov_rank) == (
        config.markov_kind,
        config.markov_rank,
    ):
        markov = params.markov
    if found.confidence_kind == config.confidence_kind and _shapes(
        params.confidence
    ) == _shapes(confidence):
        confidence = params.confidence
    return dataclasses.replace(body, markov=markov, confidence=confidence)


def _shapes(tree):
    return jax.tree.map(lambda x: x.shape, tree)
