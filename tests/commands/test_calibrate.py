"""`dspark calibrate` on a tiny target."""

import json

import pytest

from dspark_jax.commands import drafters as loading
from dspark_jax.scheduling import calibration


def test_fits_on_one_half_and_judges_by_the_other(
    run, target, drafters, prompt_file, tmp_path
):
    path = tmp_path / "sts.json"
    arguments = [
        "calibrate", "--target", target, "--prompts", prompt_file,
        "--drafter", drafters["dspark_vanilla_b4"], "--rounds", 150,
        "--rule", "block", "--temperature", 0.9, "--max-new-tokens", 20,
        "--batch", 8, "--output", path, "--plot", tmp_path / "figure.png",
    ]  # fmt: skip
    status, out, err = run(*arguments, "--json")
    assert status == 0, err
    result = json.loads(out.splitlines()[-1])
    found = calibration.read(path)
    assert list(found.temperatures) == result["temperatures"]
    assert (found.rule, found.temperature) == ("block", 0.9)
    assert found.dataset == "prompts.jsonl"
    assert found.num_samples == result["num_rounds_fitted"] >= 150
    assert result["num_rounds_judged"] >= 150
    assert len(found.ece_after) == 4
    after = result["after"]["slots"]
    assert [slot["ece"] for slot in after] == list(found.ece_after)
    assert [slot["num_rounds"] for slot in after] == result["num_judged_at"]
    assert sorted(result["num_judged_at"])[::-1] == result["num_judged_at"]
    assert all(
        reached <= judged
        for reached, judged in zip(
            result["num_reached_at"], result["num_judged_at"], strict=True
        )
    )
    for name in ("ece_before", "ece_after", "ideal_ece"):
        assert 0 < result[f"{name}_mean"] <= result[f"{name}_worst"]
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    # The same again, as a table.
    status, out, err = run(*arguments)
    assert status == 0
    assert "calibration of drafter, rule block, T = 0.9, judged by" in out
    assert f"{result['temperatures'][2]:.3f}" in out
    fewest = result["num_fitted_at"][-1]
    assert f"the last slot was fitted on {fewest} verified drafts" in out
    assert out.endswith("%; give more --rounds\n")
    assert "…" not in out
    assert "to judge:" in err
    assert list(calibration.read(path).temperatures) == result["temperatures"]


def test_greedy_decodes_once_and_says_so(run, target, drafters, tmp_path):
    path = tmp_path / "corpus.jsonl"
    turns = [{"role": "system", "content": "x"}, {"role": "user", "content": "hi"}]
    path.write_text(
        "".join(
            json.dumps({"conversations": [*turns, {"role": "user", "content": str(i)}]})
            + "\n"
            for i in range(4)
        )
    )
    status, out, err = run(
        "calibrate", "--target", target, "--corpus", path, "--temperature", 0,
        "--drafter", drafters["dspark_vanilla_b4"], "--rounds", 10_000,
        "--max-new-tokens", 20, "--json",
    )  # fmt: skip
    assert status == 0, err
    assert "fewer than --rounds 10000: at temperature 0" in err
    assert json.loads(out)["num_rounds_judged"] < 100


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rounds", "0"], "--rounds must be at least 1, got 0"),
        (["--temperature", "-1"], "--temperature must be a number >= 0"),
        (["--batch", "0"], "--batch must be at least 1"),
        (["--prompts", __file__, "--corpus", __file__], "exclude each other"),
        (["--corpus", "nowhere"], "--corpus: no such file or folder: nowhere"),
        (["--drafter", "prompt-lookup"], "--drafter needs a confidence head"),
        (["--output", "no/where/sts.json"], "--output: no such folder: no/where"),
        (["--plot", "no/where/a.png"], "--plot: no such folder: no/where"),
        (["--prompts", __file__], "line 1 is not valid JSON"),
    ],
)
def test_bad_input_is_one_line_before_any_model(run, monkeypatch, arguments, message):
    monkeypatch.setattr(loading, "load", None)
    status, out, err = run("calibrate", *arguments)
    assert (status, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_too_few_prompts(run, tmp_path):
    path = tmp_path / "one.jsonl"
    path.write_text('{"id": "a", "domain": "b", "prompt": "c"}\n')
    status, _, err = run("calibrate", "--prompts", path)
    assert status == 2
    assert "prompts must fill two halves: at least 2 of one domain, got 1 in 1" in err


def test_a_drafter_without_confidences(run, target, drafters, prompt_file):
    status, _, err = run(
        "calibrate", "--target", target, "--prompts", prompt_file,
        "--drafter", drafters["dflash_b7"],
    )  # fmt: skip
    assert status == 2
    assert "--drafter needs a confidence head to calibrate; drafter has none" in err
