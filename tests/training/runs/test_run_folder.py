"""Whether a run may start or go on in a folder, and its records."""

import json

import pytest

from dspark_jax.training.runs import run_folder


@pytest.fixture(name="config", scope="module")
def _config(root, tiny):
    return tiny.config(root)


def test_start_resume_and_start_anew(config, tiny, tmp_path):
    path = tmp_path / "a"
    assert not run_folder.open_folder(path, config).is_resumed
    # A start that ended before it wrote anything binds nobody.
    early = run_folder.open_folder(path, tiny.replaced(config, seed=3))
    assert not early.is_resumed
    assert run_folder.open_folder(path, config).config.seed == config.seed
    run_folder.open_folder(path, config).append({"step": 1})
    folder = run_folder.open_folder(path, tiny.replaced(config, keep_last=5))
    assert folder.is_resumed
    (path / "notes.txt").write_text("mine")
    other = tiny.replaced(config, seed=7, steps=9)
    with pytest.raises(
        ValueError, match=r"another configuration \(seed: 0 -> 7; steps: 6 -> 9\): take"
    ):
        run_folder.open_folder(path, other)
    folder = run_folder.open_folder(path, other, is_fresh=True)
    assert not folder.is_resumed
    assert folder.read_records() == []
    assert (path / "notes.txt").read_text() == "mine"
    assert run_folder.open_folder(path, other, must_resume=True).is_resumed


def test_folders_that_hold_something_else(config, tmp_path):
    with pytest.raises(ValueError, match="there is no run to resume in"):
        run_folder.open_folder(tmp_path / "none", config, must_resume=True)
    assert not (tmp_path / "none").exists()
    (tmp_path / "x").write_text("")
    for path, text in (
        (tmp_path / "x", "is a file; a run needs a folder"),
        (tmp_path, "is not empty and holds no training run: it is left as it is"),
    ):
        for is_fresh in (False, True):
            with pytest.raises(ValueError, match=text):
                run_folder.open_folder(path, config, is_fresh=is_fresh)
    for content, text in (
        ({"model_type": "qwen3"}, "holds something else than a training run"),
        (
            {"format": "dspark-training-run", "config": {"seed": 1}},
            "is damaged or of another version: missing key",
        ),
    ):
        (tmp_path / "config.json").write_text(json.dumps(content))
        with pytest.raises(ValueError, match=text):
            run_folder.open_folder(tmp_path, config, is_fresh=True)


def test_a_first_start_that_was_killed(config, tmp_path):
    (tmp_path / ".config.json.abc").write_text("{")
    assert not run_folder.open_folder(tmp_path, config).is_resumed


def test_records(config, tmp_path):
    folder = run_folder.open_folder(tmp_path / "a", config)
    for step in (2, 4, 4, 6):
        folder.append({"step": step})
    with folder.metrics.open("ab") as file:
        file.write(b'{"step": 8}\n[1]\n{"step": "x"}\n{"ste\xff')
    assert folder.drop_records_after(4) == 2
    assert folder.metrics.read_text() == '{"step": 2}\n{"step": 4}\n{"step": 4}\n'
