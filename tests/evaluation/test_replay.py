"""Replayed acceptance has the measured rates and spread, and scripted words."""

import json

import numpy as np
import pytest

from dspark_jax.evaluation import replay
from dspark_jax.testing import make_tiny_models

SLOTS = [
    {"num_rounds": 1000, "accepted_share": 0.6, "auroc": 0.72},
    {"num_rounds": 1000, "accepted_share": 0.3, "auroc": 0.75},
]
CALIBRATION = {"num_reached_at": [1000, 600], "before": {"slots": SLOTS}}
EVALUATION = {
    "runs": [
        {
            "domains": {
                "sums": {"conditional_acceptance": [0.7, 0.6]},
                "tales": {"conditional_acceptance": [0.4, 0.3]},
                "all": {"conditional_acceptance": [0.5, 0.4]},
            }
        }
    ]
}


@pytest.fixture
def files(tmp_path):
    paths = tmp_path / "calibration.json", tmp_path / "evaluation.json"
    for path, values in zip(paths, (CALIBRATION, EVALUATION), strict=True):
        path.write_text(json.dumps(values))
    return paths


def test_confidences_have_the_measured_mean_and_auroc(files):
    found = replay.read(files[0])
    assert found.domains == ("all",)
    np.testing.assert_allclose(found.conditional_acceptance, [[0.6, 0.5]])
    rng = np.random.default_rng(0)
    (slots,) = found.quantiles()
    np.testing.assert_allclose(slots.mean(-1), [0.6, 0.5], atol=2e-3)
    confidence = slots[0][rng.integers(slots.shape[1], size=4000)]
    is_accepted = rng.random(4000) < confidence
    accepted, refused = confidence[is_accepted], confidence[~is_accepted]
    above = accepted[:, None] > refused[None]
    level = accepted[:, None] == refused[None]
    assert abs((above + 0.5 * level).mean() - 0.72) < 0.03


def test_domains_come_from_an_evaluation(files):
    found = replay.read(*files)
    assert found.domains == ("sums", "tales")
    assert found.conditional_acceptance == ((0.7, 0.6), (0.4, 0.3))
    assert found.quantiles().shape[:2] == (2, 2)


BAD = (
    ({}, None, "must be the JSON of `dspark calibrate --json`"),
    (CALIBRATION | {"num_reached_at": [0, 0]}, None, "must be the JSON of `dspark cal"),
    (
        CALIBRATION | {"num_reached_at": [500, 600]},
        None,
        r"lie in \(0, 1\) and ",
    ),
    (CALIBRATION, {"runs": []}, "must be the JSON of `dspark evaluate --json`"),
    (CALIBRATION, {"runs": [{"domains": {}}]}, "must give 2 conditional acceptances"),
)


@pytest.mark.parametrize(("calibration", "evaluation", "message"), BAD)
def test_bad_files(calibration, evaluation, message, tmp_path):
    paths = []
    for name, values in (("c.json", calibration), ("e.json", evaluation)):
        if values is not None:
            paths.append(tmp_path / name)
            paths[-1].write_text(json.dumps(values))
    with pytest.raises(ValueError, match=message):
        replay.read(*paths)


def test_a_drafter_of_more_slots_than_were_measured(files):
    models = make_tiny_models(block_size=3)
    with pytest.raises(ValueError, match="has 2 slots, but the drafter drafts 3"):
        replay.make_models(models.target, models.drafter, replay.read(files[0]))
