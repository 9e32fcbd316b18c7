"""The loop of a run: steps, records, checkpoints, and a clean end when asked to stop.

A record covers the steps since the one before. Records end at multiples of `log_every`
and at checkpoints; checkpoints are taken at multiples of `keep_every`, and after a
record once `checkpoint_seconds` have passed. So a run that was killed writes the same
records as one that was not.
"""

import hashlib
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from dspark_jax.training import settings
from dspark_jax.training.runs.programs import StepReport
from dspark_jax.training.runs.progress import Progress
from dspark_jax.training.runs.stopping import Stop
from dspark_jax.training.runs.trainer import Trainer, summarise
from dspark_jax.training.step import TrainState
from dspark_jax.training.target_states import Batch


class NotFiniteError(RuntimeError):
    """No drafter has a finite loss any more: going on is of no use."""


def run_steps(
    trainer: Trainer,
    state: TrainState,
    total: int,
    *,
    write: Callable[[dict[str, Any]], None],
    checkpoint: Callable[[TrainState, int], None],
    progress: Progress,
    stop: Stop,
) -> TrainState:
    """Steps from the state's own number to `total`, or until a stop is asked for.

    Args:
      write: takes a training record.
      checkpoint: takes the state after so many steps; also called at the end.

    Raises:
      NotFiniteError: the losses of all drafters are NaN or infinite.
    """
    config = trainer.config
    first = saved_step = int(state.step)
    progress.start(first, total)
    saved_time = time.monotonic()
    window = _Window(trainer, total)
    for index in range(first, total):
        batch = trainer.batches.at(index)
        state, report = trainer.step(state, batch, index, total)
        window.add(index, batch, report)
        done = index + 1
        is_end = done == total or stop.is_asked
        is_kept = config.keep_every is not None and done % config.keep_every == 0
        if done % config.log_every == 0 or is_end or is_kept:
            record = window.close()
            window = _Window(trainer, total)
            write(record)
            progress.update(record)
            losses = [r["loss"] for r in record["drafters"].values()]
            if not np.any(np.isfinite(losses)):
                raise NotFiniteError(
                    f"the loss of every drafter is NaN or infinite at step {done}: "
                    "nothing was saved after it; a smaller learning_rate, clip_norm or "
                    "float32 may help"
                )
            waited = time.monotonic() - saved_time
            if is_end or is_kept or waited > config.checkpoint_seconds:
                checkpoint(state, done)
                saved_step, saved_time = done, time.monotonic()
                window = _Window(trainer, total)  # its clock starts after this
        if stop.is_asked and saved_step == done:
            break
    return state


class _Window:
    """Steps that have not been recorded yet."""

    def __init__(self, trainer: Trainer, total: int):
        self._trainer, self._total = trainer, total
        self._reports: list[StepReport] = []
        self._hash = hashlib.blake2b(digest_size=8)
        self._num_tokens, self._index = 0, 0
        self._begin = time.monotonic()

    def add(self, index: int, batch: Batch, report: StepReport) -> None:
        self._reports.append(report)
        self._num_tokens += batch.tokens.size
        self._index = index
        self._hash.update(np.asarray(batch.tokens).tobytes())
        self._hash.update(np.asarray(batch.loss_mask).tobytes())

    def close(self) -> dict[str, Any]:
        """The record; waits for the device."""
        reports = jax.device_get(self._reports)
        seconds = max(time.monotonic() - self._begin, 1e-9)
        anchors = np.asarray([report.anchors for report in reports], np.uint32)
        rate = settings.learning_rate(
            self._index, self._total, self._trainer.train_config
        )
        return {
            "step": self._index + 1,
            "num_steps": len(reports),
            "step_ms": round(1e3 * seconds / len(reports), 2),
            "tokens_per_second": round(self._num_tokens / seconds, 1),
            "learning_rate": rate,
            "batches": self._hash.hexdigest(),
            "anchors": hashlib.blake2b(anchors.tobytes(), digest_size=8).hexdigest(),
            "drafters": summarise(
                [report.outcomes for report in reports], self._trainer.names
            ),
        }
