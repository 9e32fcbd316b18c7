"""`dspark bench serve` on tiny shapes and on a tiny model of files."""

import argparse
import json

import numpy as np
import pytest

from dspark_jax.commands import bench_engines, bench_serve
from dspark_jax.scheduling import cost_files
from dspark_jax.scheduling.costs import Costs, TokenCurve
from dspark_jax.serving import loads

RATES = [0.7, 0.65, 0.6, 0.6, 0.6, 0.6, 0.6]
SLOTS = [
    {"num_rounds": 1000, "accepted_share": float(share), "auroc": 0.75}
    for share in np.cumprod(RATES)
]
REACHED = [1000, *(1000 * np.cumprod(RATES[:-1])).tolist()]
CALIBRATION = {"num_reached_at": REACHED, "before": {"slots": SLOTS}}
QUICK = ("--page-size", 16, "--chunk", 16, "--requests", 8)


@pytest.fixture
def calibration(tmp_path):
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps(CALIBRATION))
    return path


def test_random_weights_with_replayed_acceptance(run, calibration, tmp_path):
    output, plot = tmp_path / "serve.json", tmp_path / "serve.png"
    status, out, err = run(
        "bench", "serve", "--shapes", "tiny", "--replay", calibration,
        "--concurrency", 4, "--repeats", 2, "--max-new-tokens", 40,
        "--output", output, "--plot", plot, "--json", *QUICK,
    )  # fmt: skip
    assert status == 0, err
    found = json.loads(out.splitlines()[-1])
    assert found == json.loads(output.read_text())
    assert plot.stat().st_size > 5000
    assert found["is_complete"]
    assert found["is_replayed"]
    assert found["replay"]["calibration"] == "calibration.json"
    (point,) = found["points"]
    assert point["load"] == "closed"
    assert point["concurrency"] == 4
    assert point["num_repeats"] == 2
    assert point["num_equal_words"] == {"plain": 8, "static": 8, "compact": 8}
    static = point["modes"]["static"]
    # 1 + .7 + .7 * .65 + ... = 2.9 if no window were cut at the end of an answer.
    assert 2.3 < static["accepted_length"] < 3.4
    assert point["modes"]["plain"]["accepted_length"] is None
    for mode in point["modes"].values():
        assert len(mode["tokens_per_second_of_trials"]) == 2
        assert mode["tokens_per_second"] > mode["user_tokens_per_second"] > 0
    assert static["domains"]["all"]["num_rounds"] > 0
    assert {ratio["to"] for ratio in point["ratios"].values()} <= {"plain", "static"}


def test_loads_share_engines_and_are_repeated_in_turns(run, calibration, monkeypatch):
    order = []
    closed, opened = loads.run_closed, loads.run_open
    monkeypatch.setattr(
        loads,
        "run_closed",
        lambda engine, jobs, most: order.append(most) or closed(engine, jobs, most),
    )
    monkeypatch.setattr(
        loads,
        "run_open",
        lambda engine, *rest: order.append("open") or opened(engine, *rest),
    )
    status, out, err = run(
        "bench", "serve", "--shapes", "tiny", "--replay", calibration,
        "--concurrency", 5, 1, 2, 3, 1, "--rates", 300, "--slots", 2, "--repeats", 2,
        "--modes", "compact", "--max-new-tokens", 8, "--rounds-per-step", 4, "--json",
        *QUICK,
    )  # fmt: skip
    assert status == 0, err
    assert order == [5, 1, 2, 3, "open"] * 2
    found = json.loads(out.splitlines()[-1])
    assert found["is_complete"]
    assert found["left_out"] == []
    assert found["rounds_per_step"] == 4
    # Shapes of 1, 2 and 3 requests, of 5, and those that two slots have by default.
    sizes = [{r for r, _ in e["shapes"]["compact"]} for e in found["engines"]]
    assert sizes == [{1, 2, 3}, {5}, {1, 2}]
    assert all(e["num_programs"]["compact"] <= 12 for e in found["engines"])
    assert all(len(e["step_costs"]) > 0 for e in found["engines"])
    slots = [point["num_slots"] for point in found["points"]]
    assert slots == [5, 3, 3, 3, 2]
    predicted = []
    for point in found["points"]:
        compact = point["modes"]["compact"]
        assert point["num_repeats"] == 2
        assert 0 < compact["host_share"] <= 1
        steps = compact["metrics_of_last_trial"]["steps"].values()
        predicted += [step["predicted_mean_seconds"] for step in steps]
    # Few steps a load; one that waited for other work of the machine is not timed.
    assert any(predicted)


def test_a_model_of_files_under_arrivals(run, target, drafters, prompt_file):
    status, out, err = run(
        "bench", "serve", "--target", target,
        "--drafter", drafters["dspark_vanilla_b4"], "--prompts", prompt_file,
        "--modes", "static", "--rates", 200, "--slots", 2, "--repeats", 1,
        "--max-new-tokens", 4, "--temperature", 0.7, "--draft-length", 2, "--json",
        *QUICK,
    )  # fmt: skip
    assert status == 0, err
    found = json.loads(out.splitlines()[-1])
    assert not found["is_replayed"]
    assert found["rule"] == "seeded"
    assert found["num_prompts"] == 6
    (point,) = found["points"]
    assert (point["load"], point["rate"]) == ("open", 200)
    assert set(point["modes"]["static"]["domains"]) == {"sums", "tales"}
    assert point["modes"]["static"]["request_seconds"]["p95"] > 0


def test_time_is_up(run, calibration):
    status, out, err = run(
        "bench", "serve", "--shapes", "tiny", "--replay", calibration,
        "--modes", "plain", "--concurrency", 4, 4, "--time-limit", 0.01,
        "--max-new-tokens", 4, "--json", *QUICK,
    )  # fmt: skip
    assert status == 0, err
    found = json.loads(out.splitlines()[-1])
    assert not found["is_complete"]
    assert found["points"] == []
    assert found["left_out"] == [{"concurrency": 4, "num_repeats": 3}]
    assert "time is up" in err


BAD = (
    (("--concurrency", 0), "--concurrency must be at least 1, got 0"),
    (("--rates", -1), "--rates must be a positive number, got -1.0"),
    (("--time-limit", 0), "--time-limit must be a positive number, got 0.0"),
    (("--repeats", 0), "--repeats must be at least 1, got 0"),
    (("--concurrency",), "--concurrency or --rates must name a load"),
    (("--shapes", "tiny"), "--shapes needs --replay: random weights accept nothing"),
    (("--replay", "x.json"), "--replay needs --shapes"),
    (("--replay-domains", "x.json"), "--replay-domains needs --shapes"),
    (("--modes", "cap-accept"), "cap-accept needs compact beside it, or --costs"),
    (("--prompts", "none.jsonl"), "--prompts: no such file or folder: none.jsonl"),
    (("--output", "no/such/x.json"), "--output: no such folder: no/such"),
    (
        ("--shapes", "tiny", "--replay", "x.json", "--temperature", 1),
        "--shapes is for temperature 0: its words are scripted",
    ),
    (
        ("--shapes", "tiny", "--replay", "x.json", "--drafter", "d"),
        "--drafter does not go with --shapes, which makes its own",
    ),
    (("--shapes", "tiny", "--replay", "x.json"), "No such file or directory: 'x.json'"),
)


@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_bad_input(arguments, message, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, out, err = run("bench", "serve", *arguments)
    assert status == 2
    assert out == ""
    assert err.startswith("dspark bench: error:")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(("host_share", "is_hinted"), [(0.95, True), (0.6, False)])
def test_the_table_says_when_the_host_takes_the_time(host_share, is_hinted, capsys):
    mode = {
        "tokens_per_second": 100.0,
        "user_tokens_per_second": 90.0,
        "accepted_length": None,
        "mean_verify_length": None,
        "host_share": host_share,
    }
    bench_serve.print_table(
        {
            "target": "a",
            "device": "b",
            "is_replayed": False,
            "rounds_per_step": 1,
            "points": [{"concurrency": 1, "modes": {"plain": mode}}],
        }
    )
    assert ("--rounds-per-step 4" in capsys.readouterr().out) == is_hinted


def test_says_in_what_a_cost_table_was_measured_otherwise():
    here = {"device": "A", "target": "t", "dtype": "float32", "rule": "token"}
    here |= {"drafter": {"name": "d", "num_layers": 2}}
    arguments = argparse.Namespace(
        draft_vocabulary=None, candidates=64, page_size=16, draft_length=None,
        temperature=0.0,
    )  # fmt: skip
    same = {"device": "A", "drafter": "d", "draft_length": 7, "is_greedy": True}
    assert bench_engines.differences(same, here, arguments) == []
    assert bench_engines.differences({}, here, arguments) == []
    other = same | {"device": "B", "drafter": "e", "candidates": None}
    other["is_greedy"] = False
    assert bench_engines.differences(other, here, arguments) == [
        "device B (here A)",
        "drafter e (here d)",
        "candidates None (here 64)",
        "is_greedy False (here True)",
    ]
    arguments.draft_length = 3
    found = bench_engines.differences(same, here, arguments)
    assert found == ["draft_length 7 (here 3)"]


def test_a_cost_table_of_another_device_is_said(run, calibration, tmp_path):
    costs = Costs(
        drafting=TokenCurve(
            packed_tokens=(1, 64), step_seconds=(0.01, 0.02), max_tokens=64
        ),
        info={"device": "X"},
    )
    cost_files.write(tmp_path / "costs.json", costs)
    status, out, err = run(
        "bench", "serve", "--shapes", "tiny", "--replay", calibration,
        "--costs", tmp_path / "costs.json", "--modes", "compact", "--concurrency", 2,
        "--repeats", 1, "--max-new-tokens", 8, "--json", *QUICK,
    )  # fmt: skip
    assert status == 0, err
    assert "costs.json was measured otherwise: device X (here " in err
    assert "step costs measured" not in err
    (found,) = json.loads(out)["costs"]["measured_otherwise"]
    assert found.startswith("device X (here ")
