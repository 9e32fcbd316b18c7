"""How true a drafter's confidences are, slot by slot, raw and calibrated (Figure 6).

The prediction is the survival, the product of the confidences up to a slot; the outcome
is whether the prefix up to it was accepted. A round counts at the slots that it
verified: a window ends early at a drafted stop token and at the end of a generation.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from dspark_jax.evaluation.recording import Recording
from dspark_jax.scheduling import calibration, metrics


class Reliability(NamedTuple):
    """Calibration of one slot; None where nothing can be said."""

    num_rounds: int  # that verified the slot
    accepted_share: float | None  # of them, whose prefix up to the slot was accepted
    predicted_mean: float | None
    ece: float | None
    ideal_ece: float | None  # what a perfect predictor of these values shows at this n
    auroc: float | None
    brier: float | None
    bins: metrics.Bins


class Summary(NamedTuple):
    """Over the slots that some round verified."""

    ece_mean: float | None
    ece_worst: float | None
    ideal_ece_mean: float | None
    ideal_ece_worst: float | None
    auroc_mean: float | None
    brier_mean: float | None


def by_slot(
    recording: Recording,
    temperatures: Sequence[float] | None = None,
    *,
    num_bins: int = metrics.NUM_BINS,
    num_draws: int = 100,
    seed: int = 0,
) -> list[Reliability]:
    """Reliability of the survival at slots 1..K.

    Args:
      recording: of full windows (a window that the confidences shorten would choose the
        rounds that they are judged by).
      temperatures: of the slots; None judges the raw confidences.
      num_draws, seed: of the ideal error, see `metrics.ideal_calibration_error`.

    Raises:
      ValueError: the drafter predicts no confidences.
    """
    if recording.confidence_logits is None:
        raise ValueError("`recording` holds no confidences: the drafter predicts none")
    survival = calibration.survival(recording.confidence_logits, temperatures)
    found = []
    for k in range(recording.draft_length):
        is_seen = recording.verify_length > k
        predicted = survival[is_seen, k]
        observed = recording.num_accepted[is_seen] > k
        count = len(predicted)
        found.append(
            Reliability(
                num_rounds=count,
                accepted_share=_known(observed.mean() if count else np.nan),
                predicted_mean=_known(predicted.mean() if count else np.nan),
                ece=_known(metrics.calibration_error(predicted, observed, num_bins)),
                ideal_ece=_known(
                    metrics.ideal_calibration_error(
                        predicted, num_bins, num_draws=num_draws, seed=seed
                    )
                ),
                auroc=_known(metrics.auroc(predicted, observed)),
                brier=_known(metrics.brier_score(predicted, observed)),
                bins=metrics.reliability_bins(predicted, observed, num_bins),
            )
        )
    return found


def summarise(slots: Sequence[Reliability]) -> Summary:
    """Mean and worst over the slots."""
    return Summary(
        ece_mean=_over(np.mean, slots, "ece"),
        ece_worst=_over(np.max, slots, "ece"),
        ideal_ece_mean=_over(np.mean, slots, "ideal_ece"),
        ideal_ece_worst=_over(np.max, slots, "ideal_ece"),
        auroc_mean=_over(np.mean, slots, "auroc"),
        brier_mean=_over(np.mean, slots, "brier"),
    )


def to_json(slots: Sequence[Reliability]) -> dict[str, Any]:
    """The numbers as JSON values; empty bins are null."""
    rows = []
    for slot in slots:
        row = slot._asdict()
        row["bins"] = {
            "num_rows": slot.bins.num_rows.tolist(),
            "predicted": [_known(x) for x in slot.bins.predicted],
            "observed": [_known(x) for x in slot.bins.observed],
        }
        rows.append(row)
    return {"slots": rows, **summarise(slots)._asdict()}


def _over(function: Any, slots: Sequence[Reliability], name: str) -> float | None:
    values = [getattr(slot, name) for slot in slots if getattr(slot, name) is not None]
    return float(function(values)) if values else None


def _known(value: Any) -> float | None:
    return None if np.isnan(value) else float(value)
