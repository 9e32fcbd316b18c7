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

from dspark_jax import tensor_files
from dspark_jax.config import DrafterConfig
from dspark_jax.drafters import load as drafter_load
from dspark_jax.training import (
    corpus_files,
    diagnosis,
    events,
    loop,
    plots,
    run_config,
    saving,
    self_written,
    target_states,
    training_data,
)
from dspark_jax.training import trainer as trainer_lib
from dspark_jax.training.corpus import ChatTokenizer
from dspark_jax.training.diagnosis import Findings
from dspark_jax.training.progress import Progress, brief
from dspark_jax.training.run_config import RunConfig
from dspark_jax.training.run_folder import RunFolder
from dspark_jax.training.stopping import Stop
from dspark_jax.training.trainer import Trainer
from dspark_jax.training.training_data import TrainingData
from dspark_jax.types import PyTree, Target

# Failing drafters are reported at checkpoints after this share of the steps.
_EARLY_SHARE = 0.2
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
            return stopped(stop)
        return train(prepared, progress=progress, stop=stop)


def check(config: RunConfig, target: Target) -> tuple[DrafterConfig, ...]:
    """What can be refused before any work; returns the drafters' configurations.

    Raises:
      ValueError: settings that do not fit the target or this machine.
      ImportError: plots or TensorBoard asked for without their package.
    """
    drafters = run_config.drafter_configs(config, target)
    if config.train.attention == "cudnn" and jax.default_backend() != "gpu":
        raise ValueError(
            "attention = 'cudnn' needs an NVIDIA GPU, this is "
            f"{jax.default_backend()!r}: --set train.attention=xla"
        )
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
    folder, _, trainer, num_batches = prepared
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
            return _Training(prepared, plan, checkpoints, writer, progress, stop).run(
                state, total
            )
        finally:
            if writer is not None:
                writer.close()


class _Training:
    """What the loop calls back: records, checkpoints, exports, plots, diagnosis."""

    def __init__(
        self,
        prepared: Prepared,
        plan: dict[str, Any],
        checkpoints: saving.Checkpoints,
        writer: events.Events | None,
        progress: Progress,
        stop: Stop,
    ):
        self.folder, self.data, self.trainer, _ = prepared
        self.config = self.folder.config
        self.plan, self.checkpoints = plan, checkpoints
        self.writer, self.progress, self.stop = writer, progress, stop
        self.findings: Findings | None = None
        self.held_out: dict[str, Any] = {}

    def run(self, state: trainer_lib.TrainState, total: int) -> dict[str, Any]:
        """The steps, then run.json."""
        begin = time.monotonic()
        first = int(state.step)
        state = loop.run_steps(
            self.trainer,
            state,
            total,
            write=self.write,
            checkpoint=self.checkpoint,
            progress=self.progress,
            stop=self.stop,
        )
        step = int(state.step)
        if step < total:
            self.checkpoints.wait()
            return stopped(self.stop) | {"step": step, "total_steps": total}
        if not self.held_out:  # nothing was left to do but the files
            self.held_out = self.trainer.held_out(state, self.data.held_out)
            self.export(state)
        failures = self.diagnose(state, step)
        findings = self.findings
        assert findings is not None  # `diagnose` measures
        result = {
            "step": step,
            "total_steps": total,
            "stopped_by": None,
            "held_out": self.held_out,
            "data": self.data.counts,
            "tap_scale": self.plan["tap_scale"],
            "num_batches": self.plan["num_batches"],
            "failing": failures,
            "possible_causes": diagnosis.causes(findings) if failures else [],
            "findings": findings._asdict(),
            "drafters": {
                name: str(self.folder.drafter(name)) for name in self.trainer.names
            },
            "device": jax.devices()[0].device_kind,
            "num_devices": int(self.trainer.placement.mesh.size),
            "jax": jax.__version__,
            "num_steps_here": step - first,
            "seconds": round(time.monotonic() - begin, 1),
        }
        self.checkpoints.wait()
        self.folder.write_result(result)
        return result

    def write(self, record: dict[str, Any]) -> None:
        """A record: to metrics.jsonl and to TensorBoard."""
        self.folder.append(record)
        if self.writer is not None:
            self.writer.add(record)

    def checkpoint(self, state: trainer_lib.TrainState, step: int) -> None:
        """Held-out record first: a checkpoint's records are complete before it is."""
        self.held_out = self.trainer.held_out(state, self.data.held_out)
        self.write({"step": step, "held_out": self.held_out})
        self.progress.log(f"step {step} held out: {brief(self.held_out)}")
        self.checkpoints.save(step, state)
        self.export(state)
        total = self.plan["total_steps"]
        if _EARLY_SHARE * total <= step < total:
            self.diagnose(state, step)

    def export(self, state: trainer_lib.TrainState) -> None:
        """Drafters in DeepSpec's layout with their draft vocabulary; plots."""
        ids = training_data.frequent_tokens(self.data.token_counts)
        for name, drafter, params in zip(
            self.trainer.names, self.trainer.drafters, state.params, strict=True
        ):
            folder = self.folder.drafter(name)
            saving.export(folder, drafter, params, self.trainer.train_config.tap_scale)
            tensor_files.write_json(
                folder / drafter_load.VOCABULARY_FILE,
                {"ids": ids, "target_fingerprint": drafter.target_fingerprint},
            )
        if plots.is_wanted(self.config.plots):
            plots.draw(self.folder.plots, self.folder.read_records())

    def diagnose(self, state: trainer_lib.TrainState, step: int) -> dict[str, str]:
        """Reports drafters that fail to learn; returns the rule that each breaks."""
        params = dict(zip(self.trainer.names, state.params, strict=True))
        if self.findings is None:
            self.findings = diagnosis.measure(
                self.data.held_out,
                self.data.token_counts,
                target=self.trainer.target,
                target_params=self.trainer.target_params,
                head=self.trainer.head,
                tap_layers=self.config.tap_layers,
                tap_scale=self.trainer.train_config.tap_scale,
                num_anchors=self.config.train.num_anchors,
                num_rows=self.data.num_rows,
            )
        self.findings = diagnosis.at_step(
            self.findings, params, step=step, batch_rows=self.config.batch_rows
        )
        failures = diagnosis.failing(self.held_out, self.findings)
        if failures:
            for line in diagnosis.describe(failures, self.findings):
                self.progress.log(line)
        return failures


def stopped(stop: Stop) -> dict[str, Any]:
    """The figures of a run that was ended by a signal before it was done."""
    return {"stopped_by": stop.name}


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
