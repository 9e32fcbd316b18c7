"""`dspark profile` on a tiny target."""

import json

import numpy as np
import pytest

from dspark_jax.commands import drafters as loading
from dspark_jax.scheduling import cost_files
from dspark_jax.scheduling.costs import Grid


@pytest.fixture
def tiny(target, drafters):
    return [
        "profile", "--target", target, "--drafter", drafters["dspark_vanilla_b4"],
        "--slots", 2, "--max-length", 64, "--steps", 2, "--repeats", 2, "--greedy",
    ]  # fmt: skip


def test_measures_the_engine_s_steps(run, tiny, tmp_path):
    path = tmp_path / "costs.json"
    arguments = [
        *tiny, "--buckets", "1x5", "2x2", "2x6", "2x10",
        "--context-lengths", 3, 30, "--output", path, "--plot", tmp_path / "figure.png",
    ]  # fmt: skip
    status, out, err = run(*arguments, "--fastest", "--json")
    assert status == 0, err
    result = json.loads(out.splitlines()[-1])
    assert len(result["steps"]) == 8
    assert {s["is_drafting"] for s in result["steps"]} == {True, False}
    for step in result["steps"]:
        assert 0 < step["fastest"] <= step["seconds"] <= step["slowest"]
        assert step["context_tokens"] in (3 * step["requests"], 30 * step["requests"])
    found = cost_files.read(path)
    assert isinstance(found.drafting, Grid)
    assert [p.packed_tokens for p in found.drafting.planes] == [(5,), (6, 10)]
    assert [p.packed_tokens for p in found.plain.planes] == [(2,)]
    assert found.info["draft_length"] == result["draft_length"] == 4
    assert found.info["target"] == "target0"
    seconds = found.seconds(2, [6, 10], 60)
    assert np.all(seconds > 0)
    assert seconds[0] <= seconds[1]
    # The fastest times, pooled where that makes the table monotone.
    times = [step["fastest"] for step in result["steps"] if step["is_drafting"]]
    assert found.info["statistic"] == "fastest"
    assert 0.999 * min(times) <= seconds[1] <= 1.001 * max(times)
    assert result["repair"] >= 0
    assert result["additive"]["packed_tokens"] == [5, 6, 10]
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_the_table_and_the_default_sizes(run, tiny):
    status, out, err = run(*tiny, "--repeats", 1, "--buckets", "2x2", "2x10")
    assert status == 0, err
    assert "ms of the steps of target0 with drafter" in out
    assert "additive model: " in out
    assert "measured 6 steps 1 times" in err
    assert "without `costs`" not in err
    # 49 of 64 positions are left for context: a sixteenth, a quarter and all of them.
    assert " 98 " in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--slots", "0"], "--slots must be at least 1, got 0"),
        (["--repeats", "0"], "--repeats must be at least 1, got 0"),
        (
            ["--context-lengths", "4", "0"],
            "--context-lengths must be at least 1, got 0",
        ),
        (["--context-lengths", "4", "4"], "must be strictly increasing, got [4, 4]"),
        (["--buckets", "4"], "--buckets must be REQUESTSxTOKENS, as 4x32, tokens at"),
        (["--buckets", "4x2"], "at least requests at least 1, got '4x2'"),
        (["--buckets", "0x2"], "got '0x2'"),
        (["--buckets", "1xx2"], "got '1xx2'"),
        (["--output", "no/where/costs.json"], "--output: no such folder: no/where"),
        (["--plot", "no/where/a.png"], "--plot: no such folder: no/where"),
        (["--target", "./nowhere"], "--target: no such file or folder: ./nowhere"),
        (["--target", "a/b"], "--drafter: name one for this target"),
    ],
)
def test_bad_input_is_one_line_before_any_model(run, monkeypatch, arguments, message):
    monkeypatch.setattr(loading, "load", None)
    status, out, err = run("profile", *arguments)
    assert (status, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--context-lengths", 60], "must be at most 49, so that --steps fit"),
        (["--steps", 99], "`num_steps` must be at least 1 and fit max_length = 64"),
        (["--buckets", "1x5"], "must have one of at least num_slots = 2 requests"),
        (["--draft-length", 9], "--draft-length must be at most the drafter"),
        (["--page-size", 3], "page_size must be a power of two, got 3"),
    ],
)
def test_what_does_not_fit_the_models_is_one_line(run, tiny, arguments, message):
    status, out, err = run(*tiny, *arguments)
    assert (status, out) == (2, "")
    assert message in err
    assert err.splitlines()[-1].startswith("dspark profile: error: ")
