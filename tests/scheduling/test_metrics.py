"""ECE, AUROC and Brier score: DeepSpec's numbers, and what they mean."""

import json

import numpy as np
import pytest

from dspark_jax.scheduling import calibration, metrics


def test_the_golden_numbers(golden):
    wanted = json.loads((golden / "tables" / "calibration_metrics.json").read_text())
    arrays = wanted["arrays"]
    # The reference computed in float32.
    logits = np.asarray(arrays["confidence_logits"], np.float32)
    survival = calibration.survival(logits)
    accepted = np.asarray(arrays["num_accepted"])
    length = np.asarray(arrays["effective_length"])
    found = []
    for k, row in enumerate(wanted["per_position"]):
        is_seen = length > k
        predicted, observed = survival[is_seen, k], accepted[is_seen] > k
        assert len(predicted) == row["total_weight"]
        values = {
            "ece": metrics.calibration_error(predicted, observed),
            "auc": metrics.auroc(predicted, observed),
            "brier": metrics.brier_score(predicted, observed),
            "pred_mean": float(predicted.mean()),
            "target_mean": float(observed.mean()),
        }
        for name, value in values.items():
            assert value == pytest.approx(row[name], abs=1e-6), (k, name)
        bins = metrics.reliability_bins(predicted, observed)
        for one in row["reliability"]:
            b = one["bin"]
            assert bins.num_rows[b] == one["weight"]
            assert bins.predicted[b] == pytest.approx(one["avg_pred"], abs=1e-6)
            assert bins.observed[b] == pytest.approx(one["avg_target"], abs=1e-6)
        found.append(values)
    weights = [row["total_weight"] for row in wanted["per_position"]]
    for name, values in found[0].items():
        del values
        key = name if name.endswith("mean") else f"{name}_mean"
        mean = np.average([row[name] for row in found], weights=weights)
        assert mean == pytest.approx(wanted["summary"][key], abs=1e-6), name


def test_by_hand():
    predicted = np.array([0.1, 0.1, 0.9, 0.9])
    observed = np.array([0, 1, 1, 1])
    assert metrics.calibration_error(predicted, observed) == pytest.approx(0.25)
    assert metrics.brier_score(predicted, observed) == pytest.approx(
        (0.01 + 0.81 + 0.01 + 0.01) / 4
    )
    # Ones at .1, .9, .9 against a zero at .1: half a pair and two.
    assert metrics.auroc(predicted, observed) == pytest.approx(2.5 / 3)


def test_ideal_error_is_what_a_perfect_predictor_shows():
    random = np.random.default_rng(0)
    predicted = random.random(4000)
    shown = [
        metrics.calibration_error(predicted, random.random(4000) < predicted)
        for _ in range(200)
    ]
    ideal = metrics.ideal_calibration_error(predicted, num_draws=200)
    sigma = np.std(shown) * np.sqrt(2 / 200)
    assert abs(ideal - np.mean(shown)) < 5 * sigma
    assert ideal == metrics.ideal_calibration_error(predicted, num_draws=200)
    more = metrics.ideal_calibration_error(np.tile(predicted, 16))
    assert more == pytest.approx(ideal / 4, rel=0.15)  # falls as 1 / sqrt(n)


def test_nothing_to_measure():
    nothing = np.zeros(0)
    assert np.isnan(metrics.calibration_error(nothing, nothing))
    assert np.isnan(metrics.ideal_calibration_error(nothing))
    assert np.isnan(metrics.brier_score(nothing, nothing))
    assert np.isnan(metrics.auroc(nothing, nothing))
    assert np.isnan(metrics.auroc(np.array([0.2, 0.3]), np.array([1, 1])))
    bins = metrics.reliability_bins(np.array([0.2]), np.array([1]))
    assert np.isnan(bins.predicted).sum() == 19


@pytest.mark.parametrize(
    ("predicted", "observed", "message"),
    [
        ([[0.5]], [[1]], "must both have shape \\(n,\\)"),
        ([0.5], [1, 0], "must both have shape \\(n,\\)"),
        ([1.5], [1], "must hold probabilities in \\[0, 1\\]"),
        ([np.nan], [1], "must hold probabilities in \\[0, 1\\]"),
        ([0.5], [0.5], "`observed` must hold zeros and ones"),
    ],
)
@pytest.mark.parametrize(
    "measure",
    [
        metrics.calibration_error,
        metrics.auroc,
        metrics.brier_score,
        metrics.reliability_bins,
    ],
)
def test_bad_arguments(measure, predicted, observed, message):
    with pytest.raises(ValueError, match=message):
        measure(np.array(predicted), np.array(observed))
