"""Sequential temperature scaling: golden tables, what it must do, and its file."""

import dataclasses
import json

import numpy as np
import pytest

from dspark_jax.scheduling import calibration, metrics
from dspark_jax.scheduling.calibration import Calibration


def cases(golden):
    return json.loads((golden / "tables" / "sts.json").read_text())["cases"]


@pytest.mark.parametrize("number", range(3))
def test_temperatures_are_the_golden_ones(golden, number):
    case = cases(golden)[number]
    logits = np.asarray(case["confidence_logits"], np.float32)
    length = np.asarray(case["length"])
    accepted = np.minimum(case["num_accepted"], length)
    bins = case["num_bins"]
    grid = np.asarray(case["grid"])
    found = calibration.fit(logits, accepted, length, grid=grid, num_bins=bins)
    assert list(found) == case["temperatures"]
    np.testing.assert_allclose(
        calibration.survival(logits, found)[:8],
        case["calibrated_prefix_prob_first8"],
        rtol=1e-12,
    )
    for k, wanted in enumerate(case["per_position"]):
        is_seen = length > k
        assert int(is_seen.sum()) == wanted["num_samples"]
        observed = accepted[is_seen] > k

        def error(temperatures, is_seen=is_seen, observed=observed, k=k):
            predicted = calibration.survival(logits, temperatures)[is_seen, k]
            return metrics.calibration_error(predicted, observed, bins)

        tail = (1.0,) * (logits.shape[1] - k - 1)
        by_grid = [error((*found[:k], t, *tail)) for t in grid]
        np.testing.assert_allclose(by_grid, wanted["ece_by_grid"], atol=1e-12)
        assert error(found) == pytest.approx(wanted["ece_calibrated"], abs=1e-12)
        assert error(None) == pytest.approx(wanted["ece_uncalibrated"], abs=1e-12)


def overconfident(n, length=4, seed=0):
    """Rounds whose confidences are sigmoid(2 z) while slots survive with sigmoid(z)."""
    random = np.random.default_rng(seed)
    logits = random.normal(0.5, 1.0, (n, length))
    passes = random.random((n, length)) < calibration.confidence(logits)
    accepted = np.cumprod(passes, axis=1).sum(axis=1)
    return 2 * logits, accepted, np.full(n, length)


def errors(logits, accepted, temperatures):
    survival = calibration.survival(logits, temperatures)
    return np.array(
        [
            metrics.calibration_error(survival[:, k], accepted > k)
            for k in range(logits.shape[1])
        ]
    )


def test_calibrates_an_overconfident_predictor_on_rounds_it_did_not_see():
    fitted = calibration.fit(*overconfident(20_000))
    np.testing.assert_allclose(fitted, 2.0, rtol=0.2)
    logits, accepted, _ = overconfident(20_000, seed=1)
    before, after = errors(logits, accepted, None), errors(logits, accepted, fitted)
    ideal = [
        metrics.ideal_calibration_error(calibration.survival(logits, fitted)[:, k])
        for k in range(4)
    ]
    assert np.all(before > 0.03)
    assert np.all(after < 0.015)
    assert np.all(after < 2 * np.array(ideal))


def test_slots_that_no_round_verified_keep_their_confidence():
    logits, accepted, verified = overconfident(500)
    verified = np.minimum(verified, 2)
    fitted = calibration.fit(logits, np.minimum(accepted, 2), verified)
    assert fitted[0] > 1.3
    assert fitted[2:] == (1.0, 1.0)


def test_rounds_that_did_not_verify_a_slot_do_not_count_there():
    logits, accepted, verified = overconfident(3000)
    fitted = calibration.fit(logits, accepted, verified)
    noise = np.full((2000, 4), 7.0)  # confident, and refused after one slot
    mixed = calibration.fit(
        np.concatenate([logits, noise]),
        np.concatenate([accepted, np.ones(2000, int)]),
        np.concatenate([verified, np.ones(2000, int)]),
    )
    assert mixed[0] != fitted[0]
    refit = calibration.fit(logits, accepted, verified, grid=np.array([mixed[0]]))
    assert refit[0] == mixed[0]


def test_a_confidence_that_is_not_finite_is_zero():
    logits = np.array([[np.nan, 3.0], [np.inf, 3.0], [-np.inf, 3.0], [0.0, 800.0]])
    survival = calibration.survival(logits)
    assert survival.tolist() == [[0, 0], [0, 0], [0, 0], [0.5, 0.5]]


def test_the_grid_holds_one():
    grid = calibration.default_grid()
    assert 1.0 in grid
    assert (grid[0], grid[-1]) == pytest.approx((0.1, 10))


SAVED = Calibration(
    temperatures=(1.5, 0.75),
    dataset="held-back text",
    num_samples=50_000,
    ece_before=(0.05, 0.1),
    ece_after=(0.01, 0.02),
    rule="block",
    temperature=1.0,
)


def test_written_and_read(tmp_path):
    path = tmp_path / "sts.json"
    calibration.write(path, SAVED)
    assert calibration.read(path) == SAVED
    assert [p.name for p in tmp_path.iterdir()] == ["sts.json"]
    values = json.loads(path.read_text())
    # The fields and types of SGLang's reader.
    kinds = {
        "temperatures": list,
        "dataset": str,
        "num_samples": int,
        "ece_before": list,
        "ece_after": list,
    }
    assert {name: type(values[name]) for name in kinds} == kinds


def test_a_file_of_sglang_is_read(tmp_path):
    path = tmp_path / "sts.json"
    path.write_text('{"temperatures": [1, 1.25]}')
    found = calibration.read(path)
    assert found == Calibration(temperatures=(1.0, 1.25))
    assert found.rule is None


def test_a_write_that_fails_leaves_the_old_file(tmp_path):
    path = tmp_path / "sts.json"
    calibration.write(path, SAVED)
    with pytest.raises(ValueError, match="not JSON compliant"):
        calibration.json_files.write(path, {"temperatures": [float("nan")]})
    assert calibration.read(path) == SAVED
    assert [p.name for p in tmp_path.iterdir()] == ["sts.json"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not valid JSON"),
        ("[1]", "must hold a JSON object, got list"),
        ('{"temperatures": [1], "temperatures": [2]}', "a key occurs twice"),
        ('{"temperatures": [NaN]}', "NaN is not a number"),
        ("[" * 100_000, "is not valid JSON"),
        ("{}", "must hold the key 'temperatures'"),
        ('{"temperatures": []}', "must hold at least one value"),
        ('{"temperatures": [0]}', "must be positive and finite"),
        ('{"temperatures": [1e999]}', "must be positive and finite"),
        ('{"temperatures": ["1"]}', "must hold numbers"),
        ('{"temperatures": [true]}', "must hold numbers"),
        ('{"temperatures": 1}', "must be a list of at most 1024"),
        (json.dumps({"temperatures": [1] * 1025}), "must be a list of at most 1024"),
        ('{"temperatures": [1], "temp": 1}', "unknown key 'temp'"),
        (f'{{"temperatures": [1{"0" * 400}]}}', "must hold numbers"),
        (f'{{"temperatures": [1], "ece_after": [1{"0" * 400}]}}', "must hold numbers"),
        (f'{{"temperatures": [1], "temperature": 1{"0" * 400}}}', "has a wrong type"),
        ('{"temperatures": [1], "temperature": false}', "'temperature' has a wrong"),
        ('{"temperatures": [1], "num_samples": false}', "'num_samples' has a wrong"),
        ('{"temperatures": [1], "rule": 1}', "'rule' has a wrong type: 1"),
        ('{"temperatures": [1], "temperature": "1"}', "'temperature' has a wrong"),
        ('{"temperatures": [1], "temperature": -1}', "`temperature` must be >= 0"),
        ('{"temperatures": [1], "num_samples": 1.5}', "'num_samples' has a wrong"),
        ('{"temperatures": [1], "num_samples": -1}', "`num_samples` must be >= 0"),
        ('{"temperatures": [1], "ece_after": [2]}', "must lie in \\[0, 1\\]"),
        ('{"temperatures": [1], "ece_after": [0, 0]}', "must have one value a slot, 1"),
    ],
)
def test_bad_files(tmp_path, text, message):
    path = tmp_path / "sts.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        calibration.read(path)
    assert str(path) in str(caught.value)


def test_a_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"sts\.json"):
        calibration.read(tmp_path / "sts.json")


def test_a_huge_file(tmp_path, monkeypatch):
    monkeypatch.setattr(calibration.json_files, "MAX_BYTES", 10)
    calibration.write(tmp_path / "sts.json", SAVED)
    with pytest.raises(ValueError, match="has more than 10 bytes"):
        calibration.read(tmp_path / "sts.json")


GOOD = (np.zeros((5, 3)), np.array([0, 1, 2, 3, 0]), np.full(5, 3))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: np.zeros(5)}, "`confidence_logits` must have shape \\(n, K\\)"),
        ({1: np.zeros(4, int)}, "`num_accepted` must have shape \\(n,\\) = \\(5,\\)"),
        ({2: np.zeros(4, int)}, "`verify_length` must have shape \\(n,\\) = \\(5,\\)"),
        ({2: np.zeros(5, int)}, "`num_accepted` must lie in 0..verify_length"),
        ({1: np.full(5, -1)}, "`num_accepted` must lie in 0..verify_length"),
        ({2: np.full(5, 4)}, "`verify_length` must be at most K = 3, got 4"),
    ],
)
def test_bad_rounds(change, message):
    arguments = [change.get(i, value) for i, value in enumerate(GOOD)]
    with pytest.raises(ValueError, match=message):
        calibration.fit(*arguments)


@pytest.mark.parametrize("grid", [[], [0.0], [np.inf], [[1.0]]])
def test_bad_grids(grid):
    with pytest.raises(ValueError, match="`grid` must be positive finite"):
        calibration.fit(*GOOD, grid=np.array(grid))


def test_too_few_temperatures():
    with pytest.raises(ValueError, match="at least 3, got 2"):
        calibration.survival(np.zeros((5, 3)), (1.0, 1.0))
    with pytest.raises(ValueError, match="`confidence_logits` must have shape"):
        calibration.survival(np.zeros(3))


def test_a_calibration_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SAVED.rule = "token"


def test_raw_confidences_are_calibrated_like_their_logits():
    logits = np.random.default_rng(0).normal(0, 3, (50, 4))
    temperatures = (0.5, 1.0, 2.0, 7.0, 9.0)  # of more slots than drafted
    raw = calibration.confidence(logits)
    np.testing.assert_allclose(
        calibration.apply(raw, temperatures),
        calibration.confidence(logits, np.array([temperatures[:4]])),
        rtol=1e-9,
    )
    edge = calibration.apply(np.array([[0.0, 1.0, np.nan, np.inf]]), temperatures)
    assert edge.tolist() == [[0, 1, 0, 0]]


@pytest.mark.parametrize(
    ("raw", "temperatures", "message"),
    [
        (np.ones(3), (1,) * 3, r"`confidence` must have shape \(n, K\), got \(3,\)"),
        (np.ones((1, 3)), (1, 1), "must have one value a slot, at least 3, got 2"),
        (np.full((1, 1), 1.5), (1,), r"`confidence` must lie in \[0, 1\]"),
        (np.full((1, 1), -0.5), (1,), r"`confidence` must lie in \[0, 1\]"),
    ],
)
def test_bad_confidences(raw, temperatures, message):
    with pytest.raises(ValueError, match=message):
        calibration.apply(raw, temperatures)


def test_a_calibration_fits_what_it_was_fitted_for():
    calibration.check_fits(SAVED, draft_length=2, rule="block", temperature=1.0)
    calibration.check_fits(SAVED, draft_length=1)
    unknown = Calibration(temperatures=(1.0,))
    calibration.check_fits(unknown, draft_length=1, rule="token", temperature=0.7)
    for use, message in (
        ({"draft_length": 7}, "must have one value a slot, at least 7, got 2"),
        ({"draft_length": 2, "rule": "token"}, "fitted for rule 'block', not for 'tok"),
        ({"draft_length": 2, "temperature": 0.7}, "for temperature 1.0, not for 0.7"),
    ):
        with pytest.raises(ValueError, match=message):
            calibration.check_fits(SAVED, **use)


def test_extreme_temperatures_scale_confidences_without_overflow():
    raw = np.array([[0.5, 0.9, 0.1, 0.0, 1.0]])
    found = calibration.apply(raw, (1e-5, 1e-9, 1e-9, 1e-9, 1e-9))
    assert found.tolist() == [[0.5, 1.0, 0.0, 0.0, 1.0]]
    found = calibration.apply(raw, (1e9,) * 5)
    np.testing.assert_allclose(found, [[0.5, 0.5, 0.5, 0.0, 1.0]], atol=1e-8)
