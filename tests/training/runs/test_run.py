"""A run at tiny sizes: files, a stop and a resumption, several devices."""

import dataclasses
import json
import os
import signal

import chex
import jax
import numpy as np
import pytest

from dspark_jax import tensor_files
from dspark_jax.drafters import load as drafter_load
from dspark_jax.interop import deepspec
from dspark_jax.training.runs import events, loop, plots, run, run_folder, saving
from dspark_jax.training.runs import trainer as trainer_lib

pytestmark = pytest.mark.usefixtures("quick_compilation")

TIMES = ("step_ms", "tokens_per_second")


def start(tiny, target, path, config, **how):
    folder = run_folder.open_folder(path, config, **how)
    return run.run(folder, *target, tiny.ByteTokenizer())


def records_of(path):
    found = [json.loads(x) for x in (path / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in r.items() if k not in TIMES} for r in found]


def last_state(path, step):
    with saving.Checkpoints(path / "checkpoints") as checkpoints:
        assert checkpoints.steps[-1] == step
        return checkpoints._checkpointer.load(step)


several_devices = pytest.mark.skipif(
    len(jax.local_devices()) < 8, reason="needs eight devices, as a CPU pretends"
)


@pytest.fixture(name="config", scope="module")
def _config(root, tiny):
    return tiny.config(root)


@pytest.fixture(name="target", scope="module")
def _target(tiny):
    return tiny.random_target()


@pytest.fixture(name="finished", scope="module")
def _finished(config, tiny, target, tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "a"
    return path, start(tiny, target, path, config)


def test_a_run_leaves_its_files(config, target, finished):
    path, result = finished
    assert result["step"] == result["total_steps"] == 6
    assert result["stopped_by"] is None
    for spec in config.drafters:
        folder = path / "drafters" / spec.name
        assert deepspec.load(folder)[0].param_dtype == "bfloat16"
        drafter_load.load_drafter(
            folder, target[0], target_params=target[1], draft_vocabulary=5
        )
    found = records_of(path)
    assert [r["step"] for r in found] == [2, 4, 6, 6]
    names = {spec.name for spec in config.drafters}
    assert set(found[0]["drafters"]) == set(found[-1]["held_out"]) == names
    assert found[0]["drafters"]["no-markov-smollm2-135m"]["gradient_norm"] > 0
    assert "gradient_norm" not in found[-1]["held_out"]["no-markov-smollm2-135m"]
    assert found[-1]["held_out"] == result["held_out"]
    for name in ("loss", "accepted_length", "acceptance"):
        data = (path / "plots" / f"{name}.png").read_bytes()
        assert data.startswith(b"\x89PNG")
    assert list((path / "events").glob("events.out.tfevents.*"))
    assert tensor_files.read_json(path / "run.json")["step"] == 6
    # This target mostly repeats its last token, which is soon learnt.
    assert result["failing"] == {}
    assert result["findings"]["steps"] == 6
    assert result["findings"]["epochs"] == 1.0


def test_the_resolved_configuration_is_the_configuration(config, finished):
    from dspark_jax.training.runs import run_config

    assert run_config.load(finished[0] / "config.toml") == config


def test_a_finished_run_is_left_alone(config, finished):
    folder = run_folder.open_folder(finished[0], config, must_resume=True)
    assert folder.read_result()["step"] == 6


def test_a_stopped_run_goes_on_bit_for_bit(
    config, tiny, target, finished, tmp_path, monkeypatch
):
    append = run_folder.RunFolder.append
    handlers = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]

    def interrupted(self, record):
        append(self, record)
        if record["step"] == 2:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(run_folder.RunFolder, "append", interrupted)
        first = start(tiny, target, tmp_path / "b", config)
    assert first == {"stopped_by": "SIGINT", "step": 3, "total_steps": 6}
    assert not (tmp_path / "b" / "run.json").exists()
    assert handlers == [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    (tmp_path / "b" / "corpus.npz").unlink()  # it is written again, the same
    second = start(tiny, target, tmp_path / "b", config)
    assert second["step"] == 6
    assert [r["step"] for r in records_of(tmp_path / "b")] == [2, 3, 3, 4, 6, 6]
    states = last_state(tmp_path / "b", 6), last_state(finished[0], 6)
    if jax.default_backend() == "cpu":
        chex.assert_trees_all_equal(*states)
        assert records_of(tmp_path / "b")[-2:] == records_of(finished[0])[-2:]
    else:  # sums on an accelerator have no fixed order
        chex.assert_trees_all_close(*states, rtol=1e-3, atol=1e-6)


def test_records_past_the_restored_step_are_dropped(
    config, tiny, target, finished, tmp_path, capsys
):
    path = tmp_path / "c"
    folder = run_folder.open_folder(path, config)
    folder.append({"step": 2, "drafters": {}})
    with folder.metrics.open("a") as file:
        file.write('{"step": 4, "dra')  # cut off by a kill
    start(tiny, target, path, config)
    assert records_of(path) == records_of(finished[0])
    assert "resumed at step 0/6, 1 records dropped" in capsys.readouterr().err


@pytest.mark.slow
@several_devices
def test_more_devices_change_rounding_only(config, tiny, target, finished, tmp_path):
    # One drafter compiles faster, and trains as it does beside another.
    changed = tiny.replaced(config, data_parallel=2, drafters=config.drafters[:1])
    start(tiny, target, tmp_path / "d", changed)
    name = config.drafters[0].name
    for found, expected in zip(
        records_of(tmp_path / "d"), records_of(finished[0]), strict=True
    ):
        for kind in ("batches", "anchors"):
            assert found.get(kind) == expected.get(kind)
        for kind in ("drafters", "held_out"):
            if kind in expected:
                np.testing.assert_allclose(
                    found[kind][name]["loss"], expected[kind][name]["loss"], rtol=1e-4
                )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param(
            {"data_parallel": 4, "fsdp": 4},
            "must be at most the 8 devices, got 4 x 4",
            marks=several_devices,
        ),
        pytest.param(
            {"data_parallel": 8},
            "must be a multiple of data_parallel x fsdp = 8 x 1",
            marks=several_devices,
        ),
        ({"row_length": 300}, "row_length must be at most 256, the target's positions"),
        ({"never_sampled": (512,)}, r"never_sampled must lie in 0\.\.511"),
        ({"mask_token": 512}, r"mask_token must lie in 0\.\.511"),
        ({"tap_layers": (0, 9)}, r"tap_layers must lie in -1\.\.3"),
        ({"max_prefix": 79}, "row_length must be above max_prefix and the"),
    ],
)
def test_what_only_the_target_and_the_machine_can_refuse(
    config, tiny, target, tmp_path, changes, message
):
    with pytest.raises(ValueError, match=message):
        start(tiny, target, tmp_path / "x", tiny.replaced(config, **changes))


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there is a GPU")
@pytest.mark.parametrize(("name", "needed"), [("cudnn", "8.0"), ("mosaic_gpu", "9.0")])
def test_kernels_need_a_gpu(config, tiny, target, name, needed):
    train = tiny.replaced(config.train, attention=name)
    message = f"attention = '{name}' can't run blocks here: needs compute .* {needed}"
    with pytest.raises(ValueError, match=message):
        run.check(tiny.replaced(config, train=train), target[0])


def test_extras_that_are_missing(config, tiny, target, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert not events.is_wanted(None)
    assert not plots.is_wanted(None)
    for name in ("tensorboard", "plots"):
        wanted = tiny.replaced(config, **{name: True})
        with pytest.raises(ImportError, match=f"{name} = true needs the package"):
            run.check(wanted, target[0])


def test_losses_that_are_not_finite_end_the_run(
    config, tiny, target, tmp_path, monkeypatch
):
    monkeypatch.setattr(
        trainer_lib.settings, "learning_rate", lambda *arguments: float("nan")
    )
    with pytest.raises(loop.NotFiniteError, match="NaN or infinite at step 2"):
        start(tiny, target, tmp_path / "n", config)
    assert not (tmp_path / "n" / "run.json").exists()


def test_warnings_about_records():
    counts = {"num_rows": 5, "num_truncated_records": 2, "num_dropped_short": 0}
    assert run.warnings_of(counts) == ["truncated records: 2"]


def test_rows_that_do_not_fit_the_memory_are_named(
    config, tiny, target, tmp_path, monkeypatch
):
    def fails(*arguments, **how):
        raise jax.errors.JaxRuntimeError("INTERNAL: Out of memory allocating 9 bytes")

    monkeypatch.setattr("dspark_jax.training.texts.corpus.write", fails)
    with pytest.raises(ValueError, match=r"write_rows = \d+ rows of \d+ tokens do not"):
        start(tiny, target, tmp_path / "m", config)
    # Nothing was written, so that another configuration may take the folder.
    folder = tmp_path / "m"
    other = tiny.replaced(config, seed=7)
    assert not run_folder.open_folder(folder, other).is_resumed


def test_what_a_missing_package_leaves_out_is_said(config, monkeypatch):
    config = dataclasses.replace(config, plots=None, tensorboard=None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    plots, events = run.left_out(config)
    assert "dspark-jax[plots]" in plots
    assert "dspark-jax[tensorboard]" in events
    asked = dataclasses.replace(config, plots=False, tensorboard=False)
    assert run.left_out(asked) == []


@pytest.mark.slow
def test_stages_and_a_warm_start(config, tiny, target, finished, tmp_path):
    """Random block lengths, then the on-policy stage, from an exported drafter."""
    train = tiny.replaced(config.train, on_policy_share=0.5, min_block=2)
    folder = finished[0] / "drafters" / config.drafters[0].name
    drafter = tiny.replaced(
        config.drafters[0], init_from=str(folder), trainable="heads"
    )
    changed = tiny.replaced(config, train=train, drafters=(drafter,), steps=4)
    result = start(tiny, target, tmp_path / "s", changed)
    assert result["step"] == 4
    found = [r for r in records_of(tmp_path / "s") if "drafters" in r]
    stages = ["tau_rounds" in r["drafters"][drafter.name] for r in found]
    assert stages == [False, True]
    _, old, _ = deepspec.load(folder)
    _, new, _ = deepspec.load(tmp_path / "s" / "drafters" / drafter.name)
    chex.assert_trees_all_equal(new.backbone, old.backbone)
    assert not np.array_equal(new.markov.w2, old.markov.w2)


def test_a_warm_start_must_fit(config, tiny, target, finished, tmp_path):
    folder = finished[0] / "drafters" / config.drafters[0].name
    drafter = tiny.replaced(config.drafters[0], init_from=str(folder), num_layers=2)
    changed = tiny.replaced(config, drafters=(drafter,))
    with pytest.raises(ValueError, match=r"init_from: .* has num_layers = 1, the"):
        start(tiny, target, tmp_path / "w", changed)
