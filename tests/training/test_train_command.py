"""`dspark train`: its answers, its refusals, and a process that is killed."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import chex
import jax
import numpy as np
import pytest

import dspark_jax
from dspark_jax import cli
from dspark_jax.training.runs import saving
from dspark_jax.training.texts import corpus_writer, data

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(name="command", scope="module")
def _command(root, tiny, chat_target):
    """The command line up to what a test adds."""
    found = ["train", str(root / "tests" / "training" / "two_drafters.toml")]
    for change in (
        *tiny.COMMAND_CHANGES,
        f"target={chat_target.folder}",
        "plots=false",
    ):
        found += ["--set", change]
    return found


def run(capsys, *arguments):
    try:
        status = cli.main([str(a) for a in arguments])
    except SystemExit as error:
        status = error.code
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return status, out, err


def test_a_run_and_its_drafter(capsys, command, tmp_path):
    work = tmp_path / "a"
    status, out, err = run(capsys, *command, "--work", work, "--json")
    assert status == 0
    result = json.loads(out.splitlines()[-1])
    assert result["step"] == result["total_steps"] == 6
    assert result["folder"] == str(work)
    assert "step 6/6  a: loss " in err
    assert not (work / "plots").exists()
    # The same command finds it complete; the text names the drafter.
    status, out, err = run(capsys, *command, "--work", work)
    assert status == 0
    assert out.startswith("a: accepted length ")
    assert "is complete: step 6" in err
    target = command[-3].removeprefix("target=")
    status, out, _ = run(
        capsys, "generate", "--target", target, "--drafter", work / "drafters" / "a",
        "--draft-vocabulary", 9, "--max-new-tokens", 5, "--json", "hi",
    )  # fmt: skip
    assert status == 0
    assert json.loads(out)["num_new_tokens"] == 5
    # Another configuration is refused, deleted with --fresh only.
    status, _, err = run(capsys, *command, "--work", work, "--set", "seed=5")
    assert status == 2
    assert "holds a run of another configuration (seed: 0 -> 5)" in err
    assert err.count("\n") == 1


@pytest.mark.skipif(len(jax.local_devices()) < 2, reason="needs two devices")
def test_dry_run(capsys, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    more = ("--set", "micro_steps=2", "--set", "data_parallel=2", "--dry-run")
    status, out, err = run(capsys, *command, *more, "--json")
    assert status == 0
    result = json.loads(out)
    assert list(tmp_path.iterdir()) == []  # it leaves nothing
    params = result["num_params"]["a"]
    held = result["bytes_per_device"]
    # Parameters and two moments in float32, on each of the two devices.
    assert 12 * params <= held["state"] < 12 * params + 1000
    assert held["total"] > held["state"] + held["temporary"]
    assert result["num_devices"] == 2
    assert result["attention"]["blocks"] == "xla"
    assert "attention: blocks xla, target xla" in err
    assert result["total_steps"] == 6
    for name in ("tokens_per_second", "step_ms", "train_seconds", "compile_seconds"):
        assert result[name] > 0
    for part in (f"{params:,} parameters of a", "GiB a device: state", "tokens/s"):
        assert part in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "--steps must be positive and finite, got 0"),
        (["--train-seconds", "nan"], "--train-seconds must be positive and finite"),
        (["--steps", "3", "--train-seconds", "3"], "exclude each other"),
        (["--resume", "--fresh"], "not allowed with argument"),
        (["--dry-run", "--fresh"], "--dry-run neither resumes a run nor deletes one"),
        (["--set", "stepz=3"], "unknown key 'stepz'; known keys:"),
        (["--set", "steps=many"], "steps must be int, got 'many'"),
        (["--set", "target=./nowhere"], "`target` must be 'smollm2-135m', a folder"),
        (["--set", "mask_token=500"], "mask_token must lie in 0..127"),
        pytest.param(
            ["--set", "train.attention=cudnn"],
            "train.attention = 'cudnn' can't run blocks here: needs compute capability",
            marks=pytest.mark.skipif(
                jax.default_backend() == "gpu", reason="there is a GPU"
            ),
        ),
        (["--resume"], "there is no run to resume in"),
    ],
)
def test_bad_input_is_one_line(capsys, command, tmp_path, arguments, message):
    work = () if "--dry-run" in arguments else ("--work", tmp_path / "a")
    status, out, err = run(capsys, *command, *work, *arguments)
    assert (status, out) == (2, "")
    assert message in err
    assert err.splitlines()[-1].startswith("dspark train: error: ")


def test_a_missing_configuration(capsys, tmp_path):
    status, _, err = run(capsys, "train", tmp_path / "none.toml")
    assert status == 2
    assert "there is no configuration file" in err


def test_train_seconds_fix_the_number_of_steps(capsys, command, tmp_path):
    more = ("--work", tmp_path / "a", "--train-seconds", "0.2", "--json")
    status, out, err = run(capsys, *command, *more)
    assert status == 0
    total = json.loads(out)["total_steps"]
    assert f"ms a step: {total} steps" in err
    plan = json.loads((tmp_path / "a" / "plan.json").read_text())
    assert plan["total_steps"] == total


def test_a_corpus_folder(capsys, command, chat_target, tmp_path):
    tokens = np.random.default_rng(0).integers(120, size=(50, 80)).astype(np.uint16)
    rows = data.Rows(tokens=tokens, loss_mask=np.ones((50, 80), np.bool_))
    config = chat_target.target.config
    corpus_writer.save_corpus(
        tmp_path / "corpus",
        [rows],
        vocab_size=config.vocab_size,
        fingerprint=config.fingerprint,
        counts={"dropped": {"too_short": 3}, "num_truncated": 0},
    )
    more = ("--set", f"corpus={tmp_path / 'corpus'}")
    status, _, err = run(capsys, *command, *more, "--work", tmp_path / "a", "--json")
    assert status == 0
    assert "corpus: 50 rows, 8 held out rows, 4,000 tokens" in err
    assert "warning: dropped.too short: 3" in err


def test_losses_that_are_not_finite(capsys, command, tmp_path):
    more = ("--work", tmp_path / "a", "--set", "train.learning_rate=1e38")
    status, _, err = run(capsys, *command, *more, "--steps", 40)
    assert status == 1
    assert "the loss of every drafter is NaN or infinite" in err


def start(command, work, quick_flags, *more):
    package = pathlib.Path(dspark_jax.__file__).parents[1]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(package), *sys.path]),
        "JAX_PLATFORMS": "cpu",  # bits are promised there
        # Each process compiles in the same way, and the first one compiles for all.
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {quick_flags}",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    line = [sys.executable, "-m", "dspark_jax.cli", *command, "--work", str(work)]
    return subprocess.Popen(
        [*line, *more], stderr=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    )


def wait_for_step(work, step, process):
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        path = work / "metrics.jsonl"
        if path.is_file() and f'"step": {step}' in path.read_text():
            return
        time.sleep(0.01)
    raise AssertionError(process.communicate()[1].decode())


def finish(process):
    _, err = process.communicate(timeout=200)
    return process.returncode, err.decode()


def records_of(work):
    found = [json.loads(x) for x in (work / "metrics.jsonl").read_text().splitlines()]
    times = ("step_ms", "tokens_per_second")
    return [{k: v for k, v in r.items() if k not in times} for r in found]


def state_of(work, step):
    with saving.Checkpoints(work / "checkpoints") as checkpoints:
        return checkpoints._checkpointer.load(step)


@pytest.mark.slow
def test_a_killed_process_goes_on_bit_for_bit(command, quick_flags, tmp_path):
    """Batches, anchors, losses and the last state are those of an unbroken run."""
    more = ("--steps", "300", "--set", "log_every=10", "--set", "keep_every=60")
    # It ends first: the others find its programs compiled.
    assert finish(start(command, tmp_path / "whole", quick_flags, *more))[0] == 0
    work = tmp_path / "killed"
    process = start(command, work, quick_flags, *more)
    wait_for_step(work, 200, process)
    process.kill()  # between the checkpoints of steps 180 and 240
    finish(process)
    stopped = start(command, work, quick_flags, *more)
    wait_for_step(work, 250, stopped)
    stopped.send_signal(signal.SIGTERM)
    status, err = finish(stopped)
    assert status == 143, err
    assert "resumed at step 180/300" in err
    assert "stopped by SIGTERM; the same command goes on" in err
    status, err = finish(start(command, work, quick_flags, *more))
    assert status == 0, err
    records, expected = records_of(work), records_of(tmp_path / "whole")
    # SIGTERM adds a checkpoint of its own, and so splits one record in two.
    common = [record for record in records if record in expected]
    assert len(expected) - len(common) <= 1
    assert len(records) - len(common) <= 3
    steps = [record["step"] for record in records if "drafters" in record]
    assert steps == sorted(set(steps))
    assert all("batches" in r and "anchors" in r for r in common if "drafters" in r)
    chex.assert_trees_all_equal(state_of(work, 300), state_of(tmp_path / "whole", 300))
    held_out = [json.loads((w / "run.json").read_text())["held_out"]
                for w in (work, tmp_path / "whole")]  # fmt: skip
    assert held_out[0] == held_out[1]
