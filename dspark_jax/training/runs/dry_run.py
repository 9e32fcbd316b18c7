"""What a run would need: parameters, memory, speed, time. Three steps, no files."""

import dataclasses
import time
from typing import Any

import jax
import numpy as np

from dspark_jax.config import DrafterConfig
from dspark_jax.training.runs import attending
from dspark_jax.training.runs.run_config import RunConfig
from dspark_jax.training.runs.trainer import Trainer
from dspark_jax.training.runs.training_data import BatchSource
from dspark_jax.training.target_states import Batch
from dspark_jax.types import PyTree, Target

_STEPS = 3


class RandomBatches:
    """Random tokens, all supervised: a stand-in for texts that are not written yet."""

    def __init__(self, config: RunConfig, vocab_size: int):
        self._config, self._vocab_size = config, vocab_size

    def at(self, step: int) -> Batch:
        """The batch of this step."""
        shape = (self._config.batch_rows, self._config.row_length)
        rng = np.random.default_rng([self._config.seed, step])
        tokens: Any = rng.integers(self._vocab_size, size=shape, dtype=np.int32)
        mask: Any = np.ones(shape, np.bool_)
        return Batch(tokens=tokens, loss_mask=mask)


def estimate(
    config: RunConfig,
    target: Target,
    target_params: PyTree,
    drafters: tuple[DrafterConfig, ...],
    batches: BatchSource,
) -> dict[str, Any]:
    """Compiles the step, takes three and returns what they show.

    `bytes_per_device` are those of the device that holds most: `state` (parameters and
    optimiser), `target`, `temporary` (what the compiled step needs meanwhile) and
    `total`, the compiler's own account of the whole step.
    """
    scale = (1.0,) * len(config.tap_layers)  # shapes and times do not depend on it
    train = dataclasses.replace(config.train, tap_scale=scale)
    trainer = Trainer(config, train, target, target_params, drafters, batches)
    state = trainer.init_state()
    shapes = [batches.at(index) for index in range(_STEPS + 1)]
    begin = time.monotonic()
    analyses = [trainer.compile(state, b).memory_analysis() for b in shapes]
    compile_seconds = time.monotonic() - begin
    per_device: dict[str, Any] = {
        "state": _largest_share(state),
        "target": _largest_share((trainer.target_params, trainer.head)),
    }
    known = [analysis for analysis in analyses if analysis is not None]
    if known:
        per_device["temporary"] = max(a.temp_size_in_bytes for a in known)
        per_device["total"] = max(
            a.argument_size_in_bytes
            + a.output_size_in_bytes
            + a.temp_size_in_bytes
            - a.alias_size_in_bytes
            for a in known
        )
    names = zip(trainer.names, state.params, strict=True)
    num_params = {name: _count(params) for name, params in names}
    state, _ = trainer.step(state, shapes[0], 0, 1000)
    jax.block_until_ready(state)
    begin = time.monotonic()
    for index in range(1, _STEPS + 1):
        state, _ = trainer.step(state, shapes[index], index, 1000)
    jax.block_until_ready(state)
    seconds = (time.monotonic() - begin) / _STEPS
    steps = config.steps or max(int(0.96 * config.train_seconds / seconds), 1)
    num_tokens = sum(batch.tokens.size for batch in shapes[1:]) / _STEPS
    return {
        "num_params": num_params,
        "num_target_params": _count(target_params),
        "bytes_per_device": per_device,
        "num_devices": int(trainer.placement.mesh.size),
        "attention": attending.report(config, target, drafters),
        "device": jax.devices()[0].device_kind,
        "compile_seconds": round(compile_seconds, 2),
        "step_ms": round(1e3 * seconds, 2),
        "tokens_per_second": round(num_tokens / seconds, 1),
        "total_steps": steps,
        "train_seconds": round(steps * seconds, 1),
    }


def _count(tree: PyTree) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def _largest_share(tree: PyTree) -> int:
    """Bytes of a tree's arrays on the device that holds most of them."""
    held: dict[Any, int] = {}
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            held[shard.device] = held.get(shard.device, 0) + shard.data.nbytes
    return max(held.values())
