"""Figures are written whole, and nothing global changes."""

import numpy as np
import pytest

from dspark_jax.evaluation import figures, plots, speed_plots
from dspark_jax.evaluation.acceptance import Acceptance, Window
from dspark_jax.evaluation.reliability import Reliability
from dspark_jax.scheduling import metrics
from dspark_jax.scheduling.costs import Costs, Grid, Plane, TokenCurve


def acceptance(value=2.5, last=None):
    return Acceptance(
        num_prompts=3,
        num_rounds=10,
        num_new_tokens=20,
        accepted_length=value,
        interval_95=None if value is None else (value - 0.1, value + 0.2),
        conditional_acceptance=[0.8, 0.7, last],
        conditional_interval_95=[(0.7, 0.9), (0.6, 0.8), None],
        num_reached=[10, 8, 0],
        accepted_length_by_cap=[1.8, 2.2, 2.5],
        repeated_20gram_share=0.0,
    )


def slot(num_rounds=100):
    random = np.random.default_rng(0)
    predicted = random.random(num_rounds)
    observed = random.random(num_rounds) < predicted
    ece = metrics.calibration_error(predicted, observed) if num_rounds else None
    bins = metrics.reliability_bins(predicted, observed)
    return Reliability(num_rounds, None, None, ece, ece, None, None, bins)


def grid():
    planes = (
        Plane(
            requests=requests,
            packed_tokens=(requests, 4 * requests),
            context_tokens=(0, 100 * requests),
            step_seconds=((0.01, 0.02), (0.02, 0.04)),
        )
        for requests in (1, 8)
    )
    return Grid(planes=tuple(planes))


SERIES = {
    "one": {"x": acceptance(), "y": acceptance(None), "all": acceptance(2.0, 0.5)},
    "two": {"x": acceptance(3.0), "y": acceptance(2.1), "all": acceptance(2.6)},
}
FIGURES = {
    "conditional": lambda path: plots.conditional_acceptance(path, SERIES),
    "length": lambda path: plots.accepted_length(path, SERIES),
    "size": lambda path: plots.by_size(
        path,
        {"a": [(5, SERIES["two"]), (2, SERIES["one"])], "b": [(5, SERIES["one"])]},
        "layers",
    ),
    "thresholds": lambda path: plots.thresholds(
        path,
        {"x": [Window(t, 2.0 - t, 4.0, 2.0, 0.4 + t / 2, None) for t in (0.0, 0.5)]},
    ),
    "one threshold": lambda path: plots.thresholds(
        path, {"x": [Window(0.5, 2.0, 4.0, 2.0, 0.4, None)]}
    ),
    "raw": lambda path: plots.reliability(path, [slot()] * 7 + [slot(0)]),
    "both": lambda path: plots.reliability(path, [slot()] * 2, [slot(50)] * 2),
    "nothing": lambda path: plots.reliability(path, [slot(0)]),
    "costs": lambda path: speed_plots.step_costs(
        path, Costs(drafting=grid(), plain=grid())
    ),
    "costs of drafts": lambda path: speed_plots.step_costs(
        path, Costs(drafting=grid())
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FIGURES)
def test_figures(tmp_path, name):
    import matplotlib

    before = dict(matplotlib.rcParams)
    FIGURES[name](tmp_path / "figure.png")
    (path,) = tmp_path.iterdir()
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 5000
    assert dict(matplotlib.rcParams) == before


@pytest.mark.parametrize(("sizes", "style"), [((1, 2), "-"), ((1, 2, 2), "none")])
def test_no_line_through_drafters_of_one_size(tmp_path, monkeypatch, sizes, style):
    import matplotlib.axes

    found = []
    monkeypatch.setattr(
        matplotlib.axes.Axes,
        "errorbar",
        lambda *_, **given: found.append(given["linestyle"]),
    )
    line = [(size, {"all": acceptance()}) for size in sizes]
    plots.by_size(tmp_path / "figure.png", {"a": line}, "layers")
    assert found == [style]


def test_without_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setattr(figures.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'dspark-jax\[plots\]'"):
        plots.accepted_length(tmp_path / "figure.png", SERIES)
    assert not list(tmp_path.iterdir())


def test_costs_that_were_not_measured(tmp_path):
    curve = TokenCurve(packed_tokens=(1,), step_seconds=(1.0,), max_tokens=1)
    with pytest.raises(TypeError, match="must hold a Grid of steps, got TokenCurve"):
        speed_plots.step_costs(tmp_path / "figure.png", Costs(drafting=curve))
