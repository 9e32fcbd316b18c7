"""Schedules and configurations of training."""

import json

import numpy as np
import pytest

from dspark_jax.training import settings


def test_learning_rates_equal_deepspec(golden):
    found = json.loads((golden / "optimizer" / "lr_schedule.json").read_text())
    for schedule in found["schedules"]:
        config = settings.TrainConfig(
            learning_rate=schedule["lr"], warmup_share=schedule["warmup_ratio"]
        )
        total = schedule["total_steps"]
        ours = [
            settings.learning_rate(i, total, config)
            for i in range(len(schedule["plain_warmup_cosine"]))
        ]
        np.testing.assert_allclose(ours, schedule["plain_warmup_cosine"], rtol=1e-9)


def test_ce_weighs_more_at_the_start():
    early = settings.LossConfig(ce_start_share=0.1, ce_start_weight=1.0)
    recipes = settings.Recipe(loss=early), settings.Recipe()
    found = [settings.ce_weights(i, 50, recipes) for i in range(7)]
    assert found == [[1.0, 0.1]] * 5 + [[0.1, 0.1]] * 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"clip_norm": 0.0}, "clip_norm must be positive, got 0.0"),
        ({"warmup_share": 1.0}, r"warmup_share must lie in \[0, 1\), got 1.0"),
        ({"min_block": -1}, "min_block must be at least 0, got -1"),
        ({"attention": "flash"}, "attention must be one of .*, got 'flash'"),
    ],
)
def test_bad_configurations(changes, message):
    with pytest.raises(ValueError, match=message):
        settings.TrainConfig(**changes)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"decay": -1.0}, ValueError, "decay must be at least 0 .*, got -1.0"),
        ({"kl_weight": -0.5}, ValueError, "kl_weight must be at least 0 .*, got -0.5"),
        ({"ce_weight": "1"}, TypeError, "ce_weight must be float, got '1'"),
        (
            {"ce_weight": 0.0, "l1_weight": 0.0, "confidence_weight": 0.0},
            ValueError,
            "a loss must have a term: all its weights are 0",
        ),
    ],
)
def test_bad_losses(changes, error, message):
    with pytest.raises(error, match=message):
        settings.LossConfig(**changes)


def test_bad_recipe():
    with pytest.raises(ValueError, match=r"trainable must be one of .*, got 'fc'"):
        settings.Recipe(trainable="fc")
