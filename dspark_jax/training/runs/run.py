"""A training run: texts, then drafters, then files; killed at any moment, it goes on.

`prepare` checks the configuration, gets the texts and fixes what must not change after
the first start (`plan.json`); `train` takes the steps, with a checkpoint now and then.
The state of a run is its folder: `run_folder` says what lies where.
"""

import dataclasses
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dspark_jax.config import DrafterConfig
from dspark_jax.training import target_states
from dspark_jax.training.runs import (
    attending,
    events,
    plots,
    run_config,
    saving,
    self_written,
    session,
    training_data,
)
from dspark_jax.training.runs.progress import Progress
from dspark_jax.training.runs.run_config import RunConfig
from dspark_jax.training.runs.run_folder import RunFolder
from dspark_jax.training.runs.stopping import Stop
from dspark_jax.training.runs.trainer import Trainer
from dspark_jax.training.runs.training_data import TrainingData
from dspark_jax.training.texts import corpus_files
from dspark_jax.training.texts.corpus import ChatTokenizer
from dspark_jax.types import PyTree, Target

# Steps that are timed to see how many `train_seconds` allow, and their share of it.
_TRIAL_STEPS, _TRIAL_SHARE = 30, 0.03


class Prepared(NamedTuple):
    """A run that can start."""

    folder: RunFolder
    data: TrainingData
    trainer: Trainer
    num_batches: int  # of the texts that the target wrote


def run(
    folder: RunFolder,
    target: Target,
    target_params: PyTree,
    tokenizer: ChatTokenizer,
) -> dict[str, Any]:
    """Prepares and trains; returns the run's figures, those of run.json.

    Ctrl-C and SIGTERM end it early with a checkpoint: `stopped_by` names the signal.
    """
    with Progress() as progress, Stop() as stop:
        prepared = prepare(
            folder, target, target_params, tokenizer, progress=progress, stop=stop
        )
        if prepared is None:
            return session.stopped(stop)
        return train(prepared, progress=progress, stop=stop)


def check(config: RunConfig, target: Target) -> tuple[DrafterConfig, ...]:
    """What can be refused before any work; returns the drafters' configurations.

    Raises:
      ValueError: settings that do not fit the target or this machine.
      ImportError: plots or TensorBoard asked for without their package.
    """
    drafters = run_config.drafter_configs(config, target)
    attending.check(config, target, drafters)
    for token in config.never_sampled:
        if token >= target.config.vocab_size:
            raise ValueError(
                f"never_sampled must lie in 0..{target.config.vocab_size - 1} (the "
                f"vocabulary), got {token}"
            )
    if config.corpus is None and config.row_length > target.config.max_position:
        raise ValueError(
            f"row_length must be at most {target.config.max_position}, the target's "
            f"positions, got {config.row_length}"
        )
    events.is_wanted(config.tensorboard)
    plots.is_wanted(config.plots)
    return drafters


def prepare(
    folder: RunFolder,
    target: Target,
    target_params: PyTree,
    tokenizer: ChatTokenizer,
    *,
    progress: Progress,
    stop: Stop,
) -> Prepared | None:
    """Gets the texts and makes the trainer; None if a stop was asked for meanwhile.

    Raises:
      ValueError: settings or files that do not fit.
      ImportError: see `check`.
    """
    config = folder.config
    drafters = check(config, target)
    attention = attending.report(config, target, drafters)
    progress.log(attending.describe(attention))
    for line in left_out(config):
        progress.log(line)
    plan = folder.read_plan()
    fingerprint = target.config.fingerprint
    if plan is not None and plan.get("target_fingerprint") != fingerprint:
        raise ValueError(
            f"{folder.path} holds a run of another target: its fingerprint is "
            f"{plan.get('target_fingerprint')!r}, this one's {fingerprint!r}"
        )
    if config.corpus is not None:
        data, num_batches = read_corpus(config, target), 0
    else:
        found = self_written.prepare(
            folder,
            config,
            target,
            target_params,
            tokenizer,
            num_batches=None if plan is None else int(plan["num_batches"]),
            progress=progress,
            stop=stop,
        )
        if found is None:
            return None
        data, num_batches = found
    progress.log(f"corpus: {_listed(data.counts)}")
    for line in warnings_of(data.counts):
        progress.log(f"warning: {line}")
    if plan is None:
        scale = measure_tap_scale(config, target, target_params, data)
    else:
        scale = tuple(float(x) for x in plan["tap_scale"])
    train_config = dataclasses.replace(config.train, tap_scale=scale)
    trainer = Trainer(
        config, train_config, target, target_params, drafters, data.batches
    )
    return Prepared(folder, data, trainer, num_batches)


def read_corpus(config: RunConfig, target: Target) -> TrainingData:
    """The corpus folder of a run.

    Raises:
      ValueError: a damaged corpus, one of another target, or too few rows.
      FileNotFoundError: no corpus there.
    """
    assert config.corpus is not None  # the caller looked
    corpus = corpus_files.load_corpus(
        config.corpus,
        vocab_size=target.config.vocab_size,
        fingerprint=target.config.fingerprint,
    )
    longest = max((bucket.length for bucket in corpus.buckets), default=0)
    if longest > target.config.max_position:
        raise ValueError(
            f"{config.corpus} holds rows of {longest} tokens, the target has "
            f"{target.config.max_position} positions"
        )
    return training_data.of_corpus(
        corpus,
        seed=config.seed,
        batch_rows=config.batch_rows,
        held_out_rows=config.held_out_rows,
    )


def train(prepared: Prepared, *, progress: Progress, stop: Stop) -> dict[str, Any]:
    """Takes the steps that are left; returns the run's figures.

    Raises:
      loop.NotFiniteError: the losses of all drafters are NaN or infinite.
    """
    folder, data, trainer, num_batches = prepared
    config = folder.config
    plan = folder.read_plan()
    if plan is None:
        plan = {
            "total_steps": _total_steps(trainer, progress),
            "tap_scale": list(trainer.train_config.tap_scale),
            "num_batches": num_batches,
            "target_fingerprint": trainer.target.config.fingerprint,
        }
        folder.write_plan(plan)
    total = int(plan["total_steps"])
    with saving.Checkpoints(
        folder.checkpoints, keep_last=config.keep_last, keep_every=config.keep_every
    ) as checkpoints:
        if checkpoints.steps:
            first = checkpoints.steps[-1]
            state = checkpoints.load(first, trainer.abstract_state())
        else:
            first, state = 0, trainer.init_state()
        if folder.is_resumed:
            dropped = folder.drop_records_after(first)
            progress.log(f"resumed at step {first}/{total}, {dropped} records dropped")
        writer = None
        if events.is_wanted(config.tensorboard):
            writer = events.Events(folder.events, first)
        try:
            return session.Session(
                folder, data, trainer, plan, checkpoints, writer, progress, stop
            ).run(state, total)
        finally:
            if writer is not None:
                writer.close()


def left_out(config: RunConfig) -> list[str]:
    """What the run will not write because a package is missing, though not refused."""
    found = []
    if config.plots is None and not plots.is_wanted(None):
        found.append("no plots: they need pip install 'dspark-jax[plots]'")
    if config.tensorboard is None and not events.is_wanted(None):
        found.append("no events: they need pip install 'dspark-jax[tensorboard]'")
    return found


def warnings_of(counts: dict[str, Any]) -> list[str]:
    """What a corpus' counts say about records that are not trained on as they were."""
    found = []
    for name, value in counts.items():
        is_loss = any(word in name for word in ("dropped", "truncated", "unsupervised"))
        if is_loss and isinstance(value, int) and value > 0:
            found.append(f"{name.removeprefix('num_').replace('_', ' ')}: {value}")
    return found


def measure_tap_scale(
    config: RunConfig, target: Target, target_params: PyTree, data: TrainingData
) -> tuple[float, ...]:
    """Factors of the tapped layers, measured on a few rows."""
    batch = jax.tree.map(lambda x: jnp.asarray(x[:16]), data.held_out[0])
    compiled = jax.jit(
        target_states.compute, static_argnames=("target", "tap_layers", "attention")
    )
    states = compiled(
        target=target,
        target_params=target_params,
        batch=batch,
        tap_layers=config.tap_layers,
        attention=config.train.attention,
    )
    return target_states.measure_tap_scale(states, len(config.tap_layers))


def _total_steps(trainer: Trainer, progress: Progress) -> int:
    """The configuration's number of steps, or what `train_seconds` allow here."""
    config = trainer.config
    if config.steps is not None:
        return config.steps
    state = trainer.init_state()
    batches = [trainer.batches.at(index) for index in range(_TRIAL_STEPS)]
    for batch in batches:
        trainer.compile(state, batch)
    state, _ = trainer.step(state, batches[0], 0, 1000)
    jax.block_until_ready(state)
    begin, count = time.monotonic(), 0
    for index, batch in enumerate(batches):
        state, _ = trainer.step(state, batch, index, 1000)
        count += 1
        if index % 3 == 2:
            jax.block_until_ready(state)
            if time.monotonic() - begin > _TRIAL_SHARE * config.train_seconds:
                break
    seconds = (time.monotonic() - begin) / count
    # A few per cent for checkpoints, evaluation and logs.
    total = max(int(0.96 * config.train_seconds / seconds), 1)
    progress.log(f"{1e3 * seconds:.1f} ms a step: {total} steps")
    return total


def _listed(counts: dict[str, Any]) -> str:
    return ", ".join(
        f"{value:,} {name.removeprefix('num_').replace('_', ' ')}"
        if isinstance(value, int)
        else f"{name.replace('_', ' ')} {value}"
        for name, value in counts.items()
    )
