"""One run of a drafter at one setting: its measures, and how they are stored."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from dspark_jax.evaluation import acceptance, prompts, reliability
from dspark_jax.evaluation.acceptance import Acceptance, Window
from dspark_jax.evaluation.recording import Recording
from dspark_jax.evaluation.reliability import Reliability
from dspark_jax.types import FINISH_REASONS

AT_RECORDED_ANCHORS = "recorded rounds, exact at their anchors"
BY_RUNS = "a run for each threshold"


class Run(NamedTuple):
    """What `dspark evaluate` says about one drafter at one setting."""

    drafter: str
    temperature: float
    rule: str
    draft_length: int
    domains: dict[str, Acceptance]
    thresholds: dict[str, list[Window]]  # by domain; empty without confidences
    thresholds_method: str
    raw: list[Reliability] | None
    calibrated: list[Reliability] | None
    finish: dict[str, int]  # prompts by the reason their answer ended
    seconds: float

    @property
    def name(self) -> str:
        """What a figure calls it, within one temperature and rule."""
        return f"{self.drafter}, K = {self.draft_length}"

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "drafter": self.drafter,
            "temperature": self.temperature,
            "rule": self.rule,
            "draft_length": self.draft_length,
            "mean_over_domains": acceptance.mean_over_domains(self.domains),
            "domains": {name: a._asdict() for name, a in self.domains.items()},
            "thresholds": {
                "method": self.thresholds_method,
                "domains": {
                    name: [window._asdict() for window in windows]
                    for name, windows in self.thresholds.items()
                },
            }
            if self.thresholds
            else None,
            "reliability": {
                "raw": _reliability(self.raw),
                "calibrated": _reliability(self.calibrated),
            },
            "finish": self.finish,
            "seconds": self.seconds,
        }


def measure(
    recording: Recording,
    domains: Sequence[str],
    *,
    drafter: str,
    temperature: float,
    rule: str,
    thresholds: Sequence[float] = (),
    threshold_runs: Sequence[Recording] | None = None,
    temperatures: Sequence[float] | None = None,
    seconds: float = 0.0,
) -> Run:
    """All measures of one recording of full windows.

    Args:
      domains: of every prompt.
      thresholds: of confidence; raw, or calibrated where `temperatures` are given.
      threshold_runs: a recording for each threshold; None replays `recording`.
      temperatures: a calibration for this rule and temperature.
    """
    has_confidence = recording.confidence_logits is not None
    by_domain = acceptance.by_domain(recording, domains)
    windows: dict[str, list[Window]] = {}
    if has_confidence and thresholds:
        for domain in by_domain:
            members = [
                index
                for index, name in enumerate(domains)
                if domain in (name, prompts.ALL)
            ]
            windows[domain] = (
                acceptance.by_threshold(
                    recording.select(members), thresholds, temperatures
                )
                if threshold_runs is None
                else [
                    acceptance.window(run.select(members), threshold)
                    for run, threshold in zip(threshold_runs, thresholds, strict=True)
                ]
            )
    finish = [FINISH_REASONS[int(code)] for code in recording.finish]
    return Run(
        drafter=drafter,
        temperature=temperature,
        rule=rule,
        draft_length=recording.draft_length,
        domains=by_domain,
        thresholds=windows,
        thresholds_method=AT_RECORDED_ANCHORS if threshold_runs is None else BY_RUNS,
        raw=reliability.by_slot(recording) if has_confidence else None,
        calibrated=reliability.by_slot(recording, temperatures)
        if has_confidence and temperatures is not None
        else None,
        finish={reason: finish.count(reason) for reason in sorted(set(finish))},
        seconds=seconds,
    )


def _reliability(slots: list[Reliability] | None) -> dict[str, Any] | None:
    return None if slots is None else reliability.to_json(slots)
