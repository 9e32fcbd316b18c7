"""Who attends in a run: said before it begins, or refused with the reason."""

from typing import Any

import jax
import jax.numpy as jnp

from dspark_jax import layers
from dspark_jax.config import DrafterConfig
from dspark_jax.training import anchor_attention, target_states
from dspark_jax.training.runs.run_config import RunConfig
from dspark_jax.types import Target
from pallas_kernels import anchor_attention as kernels


def check(
    config: RunConfig, target: Target, drafters: tuple[DrafterConfig, ...]
) -> None:
    """Refuses a name that can't run here; a run's rows are always on a mesh.

    Raises:
      ValueError: `train.attention` names it.
    """
    name = config.train.attention
    if name == "auto":
        return
    reasons = [
        ("blocks", anchor_attention.refused(name, drafter, in_shard_map=True))
        for drafter in drafters
    ]
    if name == "cudnn":
        reasons.append(("the target", kernels.supports(name, *_rows(target))))
    for whose, reason in reasons:
        if reason is not None:
            raise ValueError(
                f"train.attention = {name!r} can't run {whose} here: {reason}; "
                "--set train.attention=auto takes what can"
            )


def report(
    config: RunConfig, target: Target, drafters: tuple[DrafterConfig, ...]
) -> dict[str, Any]:
    """Names of who attends.

    Returns:
      `blocks` and `target`; and `refused`, why what "auto" prefers was not taken, by
      name.
    """
    name, drafter = config.train.attention, drafters[0]
    blocks = anchor_attention.choose(name, drafter, in_shard_map=True)
    refused = {}
    if name == "auto":
        for other in kernels.PREFERRED.get(jax.default_backend(), ()):
            if other == blocks:
                break
            refused[other] = anchor_attention.refused(other, drafter, in_shard_map=True)
    return {
        "blocks": blocks,
        "target": target_states.attends_rows(name, *_rows(target)),
        "refused": refused,
    }


def describe(found: dict[str, Any]) -> str:
    """A report in one line."""
    line = f"attention: blocks {found['blocks']}, target {found['target']}"
    reasons = [f"not {name}: {why}" for name, why in found["refused"].items()]
    return f"{line} ({'; '.join(reasons)})" if reasons else line


def _rows(target: Target) -> tuple[Any, ...]:
    block = target.config.block
    dtype = jnp.dtype(layers.dtype_of(target.config.compute_dtype))
    return tuple(
        jax.ShapeDtypeStruct((1, 1, heads, block.head_width), dtype)
        for heads in (block.num_heads, block.num_kv_heads)
    )
