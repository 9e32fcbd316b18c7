"""`dspark evaluate` on a tiny target: its numbers are the library's, and its no."""

import json

import jax
import pytest

import dspark_jax
from dspark_jax.commands import drafters as loading
from dspark_jax.commands import evaluate
from dspark_jax.evaluation import acceptance, prompts, reliability, rounds
from dspark_jax.scheduling import calibration


@pytest.fixture(scope="module")
def options(target, drafters, prompt_file):
    return [
        "evaluate",
        *("--target", target, "--prompts", prompt_file),
        *("--max-new-tokens", 24, "--batch", 4),
    ]


def test_numbers_are_the_library_s(run_json, options, drafters, target, tmp_path):
    sts = calibration.Calibration(
        temperatures=(1.5, 2.0, 0.5, 1.0), rule="block", temperature=0.8
    )
    calibration.write(tmp_path / "sts.json", sts)
    folder = tmp_path / "results" / "first"
    result = run_json(
        *options, "--drafter", drafters["dspark_vanilla_b4"],
        "--temperature", 0, 0.8, "--rule", "block", "--seed", 5, "--limit", 2,
        "--sts", tmp_path / "sts.json", "--output", folder, "--plot",
    )  # fmt: skip
    assert json.loads((folder / "evaluation.json").read_text()) == result
    assert result["is_complete"]
    assert [run["temperature"] for run in result["runs"]] == [0.0, 0.8]
    assert result["drafters"][0]["num_layers"] == 2
    found = result["runs"][1]

    model, params = dspark_jax.load_target(target)
    drafter, drafter_params = dspark_jax.load_drafter(
        drafters["dspark_vanilla_b4"], model
    )
    text = dspark_jax.load_tokenizer(target)
    chosen = prompts.in_turns(prompts.load(options[4]), 2)
    (recording,) = rounds.record(
        model,
        params,
        drafter,
        [drafter_params],
        prompts.encode(text, chosen),
        jax.random.key(5),
        temperature=0.8,
        rule="block",
        max_new_tokens=24,
        batch=4,
        stop_tokens=text.stop_tokens,
    )
    domains = acceptance.by_domain(recording, [one.domain for one in chosen])
    wanted = {name: one._asdict() for name, one in domains.items()}
    assert list(found["domains"]) == ["sums", "tales", "all"]
    assert found["domains"] == json.loads(json.dumps(wanted))
    assert found["mean_over_domains"] == acceptance.mean_over_domains(domains)
    windows = acceptance.by_threshold(recording, evaluate.THRESHOLDS, sts.temperatures)
    assert found["thresholds"]["domains"]["all"] == [w._asdict() for w in windows]
    for name, temperatures in (("raw", None), ("calibrated", sts.temperatures)):
        slots = reliability.by_slot(recording, temperatures)
        assert found["reliability"][name] == json.loads(
            json.dumps(reliability.to_json(slots))
        )
    # The calibration is for temperature 0.8 only.
    assert result["runs"][0]["reliability"]["calibrated"] is None
    assert result["runs"][0]["reliability"]["raw"] is not None
    figures = [
        f"{kind}_{setting}{ending}.png"
        for setting in ("t0", "t0.8_block")
        for kind, ending in (
            ("accepted_length", ""),
            ("conditional", ""),
            ("reliability", "_drafter_k4"),
            ("thresholds", "_drafter_k4"),
        )
    ]
    assert {path.name for path in folder.iterdir()} == {"evaluation.json", *figures}
    for path in folder.glob("*.png"):
        assert path.read_bytes().startswith(b"\x89PNG")


def test_several_drafters_lengths_and_the_clock(run, options, drafters, tmp_path):
    status, out, err = run(
        *options, "--limit", 1, "--temperature", 0, "--rule", "token", "block",
        "--drafter", f"four={drafters['dspark_vanilla_b4']}",
        "--drafter", f"seven={drafters['dspark_vanilla_b7']}",
        f"flat={drafters['dflash_b7']}", "prompt-lookup",
        "--output", tmp_path, "--plot", "--wall-clock", "--repeats", 1,
    )  # fmt: skip
    assert status == 0, err
    result = json.loads((tmp_path / "evaluation.json").read_text())
    # At temperature 0 the rules are one.
    names = ["four", "seven", "flat", "prompt-lookup"]
    assert [run["drafter"] for run in result["runs"]] == names
    assert [run["draft_length"] for run in result["runs"]] == [4, 7, 7, 7]
    assert [run["thresholds"] is None for run in result["runs"]] == [
        False, False, True, True,
    ]  # fmt: skip
    assert (tmp_path / "by_block_size_t0.png").exists()
    assert not (tmp_path / "by_num_layers_t0.png").exists()
    (clock,) = result["wall_clock"]
    assert clock["batch"] == 1
    loops = ["plain", "four, K = 4", "seven, K = 7", "flat, K = 7"]
    assert list(clock["loops"]) == [*loops, "prompt-lookup, K = 7"]
    assert clock["loops"]["plain"]["speedup_over_plain_median"] == 1
    # Greedy: every loop has the words of plain decoding, on both prompts.
    assert {loop["num_equal"] for loop in clock["loops"].values()} == {2}
    for words in ("accepted length τ by domain, greedy", "mean of domains", "four, K"):
        assert words in out
    for words in ("conditional acceptance", "confidence threshold", "time, greedy"):
        assert words in out
    assert "flat, T = 0, token, K = 7: τ" in err


def test_threshold_runs_and_draft_lengths(run_json, options, drafters):
    result = run_json(
        *options, "--limit", 1, "--temperature", 1,
        "--drafter", drafters["dspark_vanilla_b4"],
        "--draft-length", 2, 4, "--thresholds", 0, 1, "--threshold-runs",
    )  # fmt: skip
    two, four = result["runs"]
    assert (two["draft_length"], four["draft_length"]) == (2, 4)
    assert len(two["domains"]["all"]["conditional_acceptance"]) == 2
    assert four["thresholds"]["method"] == "a run for each threshold"
    everything, nothing = four["thresholds"]["domains"]["all"]
    assert everything["accepted_length"] == four["domains"]["all"]["accepted_length"]
    assert nothing["num_verified_per_round"] == 0
    assert nothing["accepted_length"] == 1


def test_an_interrupted_run_keeps_what_it_has(
    run, options, drafters, tmp_path, monkeypatch
):
    record, calls = rounds.record, []

    def interrupted(*arguments, **keywords):
        calls.append(keywords["temperature"])
        if len(calls) == 2:
            raise KeyboardInterrupt
        return record(*arguments, **keywords)

    monkeypatch.setattr(rounds, "record", interrupted)
    status, _, _ = run(
        *options, "--limit", 1, "--drafter", drafters["dspark_vanilla_b4"],
        "--output", tmp_path,
    )  # fmt: skip
    assert status == 130
    result = json.loads((tmp_path / "evaluation.json").read_text())
    assert not result["is_complete"]
    assert [run["temperature"] for run in result["runs"]] == [0.0]


def test_plots_without_matplotlib(run, options, tmp_path, monkeypatch):
    from dspark_jax.evaluation import figures

    monkeypatch.setattr(figures.importlib.util, "find_spec", lambda name: None)
    status, out, err = run(
        *options, "--drafter", "prompt-lookup", "--output", tmp_path, "--plot"
    )
    assert (status, out) == (1, "")
    assert "pip install 'dspark-jax[plots]'" in err


BAD_INPUT = [
    (["--temperature", "-1"], "--temperature must be a number >= 0, got -1.0"),
    (["--temperature", "nan"], "--temperature must be a number >= 0, got nan"),
    (["--thresholds", "0", "2"], "--thresholds must be in [0, 1], got 2.0"),
    (["--draft-length", "0"], "--draft-length must be at least 1, got 0"),
    (["--max-new-tokens", "1"], "--max-new-tokens must be at least 2, got 1"),
    (["--batch", "0"], "--batch must be at least 1, got 0"),
    (["--limit", "0"], "--limit must be at least 1, got 0"),
    (["--groups", "0"], "--groups must be at least 1, got 0"),
    (["--repeats", "0"], "--repeats must be at least 1, got 0"),
    (["--wall-clock", "0"], "--wall-clock must be at least 1, got 0"),
    (["--candidates", "0"], "--candidates must be at least 1, got 0"),
    (["--draft-vocabulary", "0"], "--draft-vocabulary must be at least 1, got 0"),
    (["--seed", "-1"], "--seed must be in 0..2^32-1, got -1"),
    (["--rule", "fast"], "argument --rule: invalid choice: 'fast'"),
    (["--prompts", "nowhere"], "--prompts: no such file or folder: nowhere"),
    (["--sts", "nowhere"], "--sts: no such file or folder: nowhere"),
    (["--drafter", "./nowhere"], "--drafter: no such file or folder: ./nowhere"),
    (["--drafter", "a=./nowhere"], "--drafter: no such file or folder: ./nowhere"),
    (["--target", "./nowhere"], "--target: no such file or folder: ./nowhere"),
    (["--plot"], "--plot needs --output, the folder of the figures"),
    (["--output", __file__], "--output must be a folder, got the file"),
    (["--sts", __file__, "--drafter", "a", "b"], "--sts belongs to one drafter"),
    (["--sts", __file__], "is not valid JSON"),
    (["--prompts", __file__], "line 1 is not valid JSON"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_INPUT)
def test_bad_input_is_one_line_before_any_model(run, monkeypatch, arguments, message):
    monkeypatch.setattr(loading, "load", None)
    status, out, err = run("evaluate", *arguments)
    assert (status, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_what_only_the_models_can_refuse(run, options, drafters, target, tmp_path):
    four = drafters["dspark_vanilla_b4"]
    calibration.write(
        tmp_path / "block.json",
        calibration.Calibration(temperatures=(1.0,) * 4, rule="block", temperature=1.0),
    )
    short = tmp_path / "short.json"
    calibration.write(short, calibration.Calibration(temperatures=(1.0,) * 3))
    for arguments, message in (
        (
            ["--drafter", four, "--draft-length", 5],
            "at most the block size 4 of",
        ),
        (["--drafter", four, four], "two are called 'drafter'; name them: NAME=SOURCE"),
        (["--drafter", "=x"], "--drafter must be SOURCE or NAME=SOURCE: '=x'"),
        (["--drafter", four, "--sts", short], "--sts has 3 temperatures, fewer than"),
        (
            ["--drafter", drafters["dflash_b7"], "--sts", short],
            "--sts needs a drafter with a confidence head",
        ),
        (
            ["--drafter", four, "--sts", tmp_path / "block.json"],
            "--sts was fitted for rule 'block' at temperature 1.0",
        ),
        (
            ["--drafter", "prompt-lookup", "--candidates", 4],
            "--candidates needs a trained drafter, not prompt-lookup",
        ),
        ([], "--drafter: name one for this target"),
    ):
        status, out, err = run(*options, *arguments)
        assert (status, out) == (2, ""), arguments
        assert message in err
        assert err.count("\n") == 1


def test_a_prompt_that_is_too_long(run, target, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"id": "a", "domain": "b", "prompt": "x" * 300}))
    status, _, err = run(
        "evaluate", "--target", target, "--prompts", path, "--drafter", "prompt-lookup"
    )
    assert status == 2
    assert "prompt 'a' has 319 tokens, too many for the 256 positions" in err
