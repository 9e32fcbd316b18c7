"""Between the steps of a run: records, checkpoints, exports, plots, diagnosis."""

import time
from typing import Any

import jax

from dspark_jax import tensor_files
from dspark_jax.drafters import load as drafter_load
from dspark_jax.training.runs import (
    attending,
    diagnosis,
    events,
    loop,
    plots,
    saving,
    training_data,
)
from dspark_jax.training.runs.diagnosis import Findings
from dspark_jax.training.runs.progress import Progress, brief
from dspark_jax.training.runs.run_folder import RunFolder
from dspark_jax.training.runs.stopping import Stop
from dspark_jax.training.runs.trainer import Trainer
from dspark_jax.training.runs.training_data import TrainingData
from dspark_jax.training.step import TrainState

# Failing drafters are reported at checkpoints after this share of the steps.
_EARLY_SHARE = 0.2


class Session:
    """One start of a run, from its last checkpoint to its end or to a stop.

    Args:
      plan: plan.json, fixed at the first start.
      writer: of TensorBoard events, or None.
    """

    def __init__(
        self,
        folder: RunFolder,
        data: TrainingData,
        trainer: Trainer,
        plan: dict[str, Any],
        checkpoints: saving.Checkpoints,
        writer: events.Events | None,
        progress: Progress,
        stop: Stop,
    ):
        self.folder, self.data, self.trainer = folder, data, trainer
        self.config = folder.config
        self.plan, self.checkpoints = plan, checkpoints
        self.writer, self.progress, self.stop = writer, progress, stop
        self.findings: Findings | None = None
        self.held_out: dict[str, Any] = {}

    def run(self, state: TrainState, total: int) -> dict[str, Any]:
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
            "attention": attending.report(
                self.config, self.trainer.target, self.trainer.drafters
            ),
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

    def checkpoint(self, state: TrainState, step: int) -> None:
        """Held-out record first: a checkpoint's records are complete before it is."""
        self.held_out = self.trainer.held_out(state, self.data.held_out)
        self.write({"step": step, "held_out": self.held_out})
        self.progress.log(f"step {step} held out: {brief(self.held_out)}")
        self.checkpoints.save(step, state)
        self.export(state)
        total = self.plan["total_steps"]
        if _EARLY_SHARE * total <= step < total:
            self.diagnose(state, step)

    def export(self, state: TrainState) -> None:
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

    def diagnose(self, state: TrainState, step: int) -> dict[str, str]:
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
