"""`dspark bench round` on tiny shapes and on a tiny model of files."""

import json

import pytest


def test_random_weights(run, tmp_path):
    output, plot = tmp_path / "round.json", tmp_path / "round.png"
    status, out, err = run(
        "bench", "round", "--shapes", "tiny", "--batches", 2, "--parts", "round",
        "plain", "draft", "markov", "target", "verdict", "observe", "--repeats", 2,
        "--steps", 1,
        "--accepted-length", 3, "--markov-cells", "1x3/4", "--output", output,
        "--plot", plot, "--json",
    )  # fmt: skip
    assert status == 0, err
    found = json.loads(out.splitlines()[-1])
    assert found == json.loads(output.read_text())
    assert plot.stat().st_size > 5000
    assert found["is_complete"]
    assert found["is_random"]
    (point,) = found["points"]
    assert set(point["variants"]) == {"base"}
    base = point["variants"]["base"]
    whole = base["parts"]["round"]
    parts = [p for name, p in base["parts"].items() if name not in ("round", "plain")]
    assert whole["bytes"] == pytest.approx(sum(part["bytes"] for part in parts))
    assert base["sum_of_parts_ms"] == pytest.approx(sum(part["ms"] for part in parts))
    for part in base["parts"].values():
        assert part["least_ms"] <= part["ms"] <= part["most_ms"]
        assert part["fraction_of_floor"] == pytest.approx(part["floor_ms"] / part["ms"])
        assert part["num_kernels"] > 0
    assert base["tokens_per_second"] == pytest.approx(3 * 2 * 1e3 / whole["ms"])
    # Weights once, keys and values of two requests: 2 layers of 64 x 2 x 8 each.
    assert base["parts"]["plain"]["bytes_of"]["cache"] == 2 * 2 * 2 * 64 * 16 * 4
    (cell,) = found["markov"]
    assert (cell["batch"], cell["draft_length"], cell["candidates"]) == (1, 3, 4)
    assert list(cell["variants"]) == ["base"]


def test_a_model_of_files(run, target, drafters):
    status, out, err = run(
        "bench", "round", "--target", target, "--drafter",
        drafters["dspark_vanilla_b4"], "--batches", 1, "--parts", "round",
        "--markov-cells", "--context", 40, 48, "--draft-length", 2, "--repeats", 1,
        "--steps", 1, "--temperature", 0.7, "--variants", "base",
        "candidates=8,attention=xla", "--kernels", "--json",
    )  # fmt: skip
    assert status == 0, err
    found = json.loads(out.splitlines()[-1])
    assert not found["is_random"]
    assert [point["context"] for point in found["points"]] == [40, 48]
    variants = found["points"][0]["variants"]
    assert set(variants) == {"base", "candidates=8,attention=xla"}
    assert all(variant["rounds_per_second"] > 0 for variant in variants.values())


def test_time_is_up(run):
    status, out, err = run(
        "bench", "round", "--shapes", "tiny", "--batches", 1, 1, "--parts", "observe",
        "--repeats", 1, "--steps", 1, "--time-limit", 0.01, "--json",
    )  # fmt: skip
    assert status == 0, err
    assert not json.loads(out.splitlines()[-1])["is_complete"]
    assert "time is up" in err


def test_an_option_that_the_compiler_does_not_know(run):
    status, out, err = run(
        "bench", "round", "--shapes", "tiny", "--batches", 1, "--parts", "verdict",
        "--variants", "xla_nonsense=1", "--json",
    )  # fmt: skip
    assert (status, out) == (2, "")
    assert "--variants: 'xla_nonsense=1' is refused by the compiler" in err


BAD = (
    (("--batches", 0), "--batches must be at least 1, got 0"),
    (("--repeats", 0), "--repeats must be at least 1, got 0"),
    (("--steps", 0), "--steps must be at least 1, got 0"),
    (("--time-limit", 0), "--time-limit must be a positive number, got 0.0"),
    (("--accepted-length", 0), "--accepted-length must be a positive number, got 0.0"),
    (("--context", 8), "--context must be at least 32, got 8"),
    (
        ("--batches", "--markov-cells"),
        "--batches or --markov-cells must name something",
    ),
    (("--variants", "fast"), "--variants must be made of base, graph"),
    (("--variants", "candidates=0"), "got 'candidates=0'"),
    (("--variants", "attention=fast"), "got 'attention=fast'"),
    (
        ("--variants", "attention=mosaic_tpu"),
        "--variants: attention mosaic_tpu needs a tpu, this is",
    ),
    (("--attention", "mosaic_tpu"), "--attention mosaic_tpu needs a tpu, this is"),
    (("--markov-cells", "1x"), "--markov-cells must be BATCHxK or BATCHxK/CANDIDATES"),
    (("--markov-cells", "1x7/"), "got '1x7/'"),
    (("--output", "no/such/x.json"), "--output: no such folder: no/such"),
    (
        ("--shapes", "tiny", "--drafter", "d"),
        "--drafter does not go with --shapes, which makes its own",
    ),
    (
        ("--shapes", "tiny", "--draft-length", 8),
        "--draft-length must be at most the drafter's block size 7, got 8",
    ),
    (
        ("--shapes", "tiny", "--context", 4096),
        "--context must be at most the target's max_position 2048, got 4096",
    ),
)


@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_bad_input(arguments, message, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, out, err = run("bench", "round", *arguments)
    assert status == 2
    assert out == ""
    assert err.startswith("dspark bench: error:")
    assert message in err
    assert err.count("\n") == 1
