"""The training command at tiny sizes: files, restart, configuration file."""

import dataclasses
import json
import os
import signal

import numpy as np
import pytest

from dspark_jax import config as config_lib
from dspark_jax import tensor_files
from dspark_jax.drafters import dspark
from dspark_jax.interop import deepspec
from dspark_jax.training import run, smoke, trainer
from dspark_jax.training.settings import RunConfig


@pytest.fixture(name="config", scope="module")
def _config(root):
    config = config_lib.load_toml(root / "configs" / "smollm2_dspark.toml", RunConfig)
    config = smoke.tiny_config(config)
    drafters = tuple(dataclasses.replace(d, num_layers=1) for d in config.drafters)
    train = dataclasses.replace(config.train, chunk_logits=2**19)
    return dataclasses.replace(
        config,
        compute_dtype="float32",
        steps=6,
        log_every=2,
        drafters=drafters,
        train=train,
        max_rows=32,
        row_length=80,
    )


@pytest.fixture(name="target", scope="module")
def _target():
    return smoke.random_target(smoke.TINY, "float32")


@pytest.fixture(name="finished", scope="module")
def _finished(config, target, tmp_path_factory):
    work = tmp_path_factory.mktemp("run")
    figures = run.run(
        config, *target, smoke.ByteTokenizer(), work=work, pieces=work / "pieces"
    )
    return work, figures


def test_a_run_leaves_its_files(config, target, finished):
    work, figures = finished
    assert figures["step"] == figures["total_steps"] == 6
    for spec in config.drafters:
        drafter, _, _ = deepspec.load(work / spec.name)
        assert drafter.param_dtype == "bfloat16"
        dspark.make_drafter(drafter, target[0])  # it fits
    lines = [
        json.loads(line) for line in (work / "metrics.jsonl").read_text().splitlines()
    ]
    assert lines[0]["drafters"]["no-markov-smollm2-135m"]["loss"] > 0
    assert [line["step"] for line in lines] == [2, 4, 6, 6]
    assert set(lines[0]["drafters"]) == {spec.name for spec in config.drafters}
    assert lines[-1]["held_out"] == figures["held_out"]
    vocabulary = tensor_files.read_json(work / "draft_vocabulary.json")["ids"]
    assert len(set(vocabulary)) == len(vocabulary) > 0
    assert (work / "pieces" / "export.tar.part0").is_file()


@pytest.mark.slow
def test_a_restart_continues_bit_for_bit(
    config, target, finished, tmp_path, monkeypatch
):
    append, stopped = trainer.append, []

    def stop_once(path, record):
        append(path, record)
        if record["step"] == 2 and not stopped:
            stopped.append(True)
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(trainer, "append", stop_once)
    first = run.run(config, *target, smoke.ByteTokenizer(), work=tmp_path)
    assert first["step"] in (2, 3)
    (tmp_path / "corpus.npz").unlink()  # it is written again
    second = run.run(config, *target, smoke.ByteTokenizer(), work=tmp_path, resume=True)
    assert second["step"] == 6
    expected = tensor_files.read(finished[0] / "state.safetensors")
    found = tensor_files.read(tmp_path / "state.safetensors")
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        np.testing.assert_array_equal(found[name], tensor, err_msg=name)


def test_unknown_keys_are_refused(root, tmp_path):
    text = (root / "configs" / "smollm2_dspark.toml").read_text()
    (tmp_path / "bad.toml").write_text(text + "\nnum_anchor = 3\n")
    with pytest.raises(ValueError, match=r"unknown key 'train.num_anchor'"):
        config_lib.load_toml(tmp_path / "bad.toml", RunConfig)
