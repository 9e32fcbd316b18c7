"""What an engine did: counts, times and calibration, from which `metrics()` is made."""

import collections
from typing import Any

import numpy as np

from dspark_jax.serving.batching import Bucket
from dspark_jax.serving.engine_config import EngineConfig
from dspark_jax.serving.results import DispatchedStep, RoundCounts


class Recorder:
    """Counts steps as the engine collects them."""

    def __init__(self, draft_length: int):
        self._draft_length = draft_length
        self.reset()

    def reset(self) -> None:
        """Forgets everything; requests under way go on being counted from here."""
        length = self._draft_length
        self.num_finished: collections.Counter[str] = collections.Counter()
        self.num_preemptions = 0
        self.num_catch_ups = self.num_caught_up = 0
        self.num_tokens = 0
        self.num_rounds = 0
        self.num_verified = 0
        self.num_accepted = 0
        self.accepted_sum = 0
        self.window_counts = np.zeros((length + 1,), np.int64)
        self.num_reached_at = np.zeros((length,), np.int64)
        self.accepted_at = np.zeros((length,), np.int64)
        self.confidence_at = np.zeros((length,), np.float64)
        self.steps: dict[str, _StepCounts] = {}
        self.num_dispatches = 0
        self.num_starved = 0
        self.host_seconds = 0.0
        self.wait_seconds = 0.0

    def add_step(
        self, step: DispatchedStep, config: EngineConfig, seconds: float
    ) -> None:
        """One step of one program, and the time it took."""
        if step.bucket is None:
            name, places = f"prefill {step.num_pieces}", step.num_pieces
            filled, rows = step.num_filled, places * config.chunk
        else:
            name, places = step_name(step.bucket), step.bucket.requests
            filled = len(step.rows)
            rows = config.rounds_per_step * step.bucket.tokens
        counts = self.steps.setdefault(name, _StepCounts())
        counts.num_steps += 1
        counts.seconds += seconds
        counts.requests += filled
        counts.request_places += places
        counts.rows += step.num_fed
        counts.row_places += rows
        if step.is_timed and step.plan is not None and step.plan.seconds is not None:
            predicted = config.rounds_per_step * step.plan.seconds
            counts.num_predicted += 1
            counts.predicted_seconds += predicted
            counts.real_seconds += seconds
            counts.error_seconds += abs(predicted - seconds)

    def add_rounds(self, counts: RoundCounts, rows: list[int]) -> None:
        """A speculative round of the requests in these rows."""
        verify_length = counts.verify_length[rows]
        num_accepted = counts.num_accepted[rows]
        slots = np.arange(self._draft_length)[None]
        self.num_rounds += len(rows)
        self.num_verified += int(verify_length.sum())
        self.num_accepted += int(num_accepted.sum())
        self.accepted_sum += int(counts.accepted_sum[rows].sum())
        self.window_counts += np.bincount(
            verify_length, minlength=len(self.window_counts)
        )
        # A slot says something about its confidence if all before it were accepted,
        # and if it could be: what a cap cut off was not refused.
        judged = counts.commit_length[rows]
        reached = slots < np.minimum(judged, num_accepted + 1)[:, None]
        self.num_reached_at += reached.sum(0)
        self.accepted_at += (slots < num_accepted[:, None]).sum(0)
        self.confidence_at += np.where(reached, counts.confidence[rows], 0).sum(0)

    def report(self, **present: Any) -> dict[str, Any]:
        """All of it as plain numbers, for JSON; `present` is what the engine adds."""
        reached = np.maximum(self.num_reached_at, 1)
        predicted, observed = self.confidence_at / reached, self.accepted_at / reached
        total = max(int(self.num_reached_at.sum()), 1)
        drift = (self.confidence_at.sum() - self.accepted_at.sum()) / total
        busy = self.host_seconds + self.wait_seconds
        return {
            **present,
            "num_finished": dict(self.num_finished),
            "num_preemptions": self.num_preemptions,
            "num_catch_ups": self.num_catch_ups,
            "num_caught_up": self.num_caught_up,
            "num_tokens": self.num_tokens,
            "num_rounds": self.num_rounds,
            "accepted_length": _share(self.accepted_sum, self.num_rounds),
            "acceptance": _share(self.num_accepted, self.num_verified),
            "mean_verify_length": _share(self.num_verified, self.num_rounds),
            "verify_length_counts": self.window_counts.tolist(),
            "calibration": {
                "num_reached_at": self.num_reached_at.tolist(),
                "predicted": predicted.tolist(),
                "observed": observed.tolist(),
                "drift": float(drift),
            },
            "steps": {name: step.report() for name, step in sorted(self.steps.items())},
            "num_dispatches": self.num_dispatches,
            "starved_share": _share(self.num_starved, self.num_dispatches),
            "host_seconds": self.host_seconds,
            "wait_seconds": self.wait_seconds,
            "host_share": _share(self.host_seconds, busy),
        }


def step_name(bucket: Bucket) -> str:
    """The name of a bucket's program in `metrics()["steps"]`."""
    kind = "plain" if bucket.is_plain else "verify"
    return f"{kind} {bucket.requests}x{bucket.tokens}"


class _StepCounts:
    def __init__(self) -> None:
        self.num_steps = 0
        self.seconds = 0.0
        self.requests = self.request_places = 0
        self.rows = self.row_places = 0
        self.num_predicted = 0
        self.predicted_seconds = self.real_seconds = self.error_seconds = 0.0

    def report(self) -> dict[str, Any]:
        return {
            "num_steps": self.num_steps,
            "mean_seconds": _share(self.seconds, self.num_steps),
            "request_utilisation": _share(self.requests, self.request_places),
            "row_utilisation": _share(self.rows, self.row_places),
            "predicted_mean_seconds": _share(
                self.predicted_seconds, self.num_predicted
            ),
            "predicted_error_share": _share(self.error_seconds, self.real_seconds),
        }


def _share(part: float, whole: float) -> float | None:
    return float(part / whole) if whole else None
