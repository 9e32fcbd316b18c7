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
    config = settings.TrainConfig(ce_start_share=0.1, ce_start_weight=1.0)
    found = [settings.ce_weight(i, 50, config) for i in range(7)]
    assert found == [1.0] * 5 + [0.1] * 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"clip_norm": 0.0}, "clip_norm must be positive, got 0.0"),
        ({"warmup_share": 1.0}, r"warmup_share must lie in \[0, 1\), got 1.0"),
        ({"loss_decay": -1.0}, "loss_decay must be positive or absent, got -1.0"),
        ({"attention": "flash"}, "attention must be one of .*, got 'flash'"),
    ],
)
def test_bad_configurations(changes, message):
    with pytest.raises(ValueError, match=message):
        settings.TrainConfig(**changes)
