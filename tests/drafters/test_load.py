"""Loading drafters: the shipped one, folders, draft vocabularies, other targets."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from dspark_jax import tensor_files
from dspark_jax.drafters import load
from dspark_jax.targets import decoder, fetch
from dspark_jax.targets.load import load_target


@pytest.fixture(scope="module")
def target_and_params(golden):
    return load_target(golden / "targets" / "qwen3_untied")


@pytest.fixture
def folder(golden, tmp_path):
    shutil.copytree(
        golden / "cases" / "dspark_vanilla_b4" / "drafter", tmp_path / "drafter"
    )
    return tmp_path / "drafter"


def edit(folder, **changes):
    values = tensor_files.read_json(folder / "config.json") | changes
    tensor_files.write_json(folder / "config.json", values)


def test_a_folder_loads_for_its_target(target_and_params, folder):
    target, target_params = target_and_params
    edit(folder, target_fingerprint=target.config.fingerprint)
    drafter, params = load.load_drafter(folder, target, target_params=target_params)
    again, _ = load.load_drafter(str(folder), target)
    assert drafter == again
    assert hash(drafter) == hash(again)
    assert drafter.config.target_fingerprint == target.config.fingerprint
    assert params.embed is None
    assert params.head is None
    assert params.draft_vocabulary is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"target_fingerprint": "0" * 16},
            "another target: its fingerprint is 0{16}, the tar",
        ),
        ({"num_target_layers": 5}, "its num_target_layers is 5, the target's is 4"),
    ],
)
def test_another_target_is_refused(target_and_params, folder, changes, message):
    edit(folder, **changes)
    with pytest.raises(ValueError, match=message):
        load.load_drafter(folder, target_and_params[0])


def test_narrow_weights_are_widened_once(target_and_params, folder):
    tensors = tensor_files.read(folder / "model.safetensors")
    narrow = {k: v.astype(ml_dtypes.bfloat16) for k, v in tensors.items()}
    tensor_files.write(folder / "model.safetensors", narrow)
    edit(folder, dtype="bfloat16")
    drafter, params = load.load_drafter(folder, target_and_params[0])
    assert drafter.config.param_dtype == drafter.config.compute_dtype == "float32"
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    np.testing.assert_array_equal(
        params.backbone.fc, narrow["fc.weight"].astype(np.float32)
    )
    drafter, params = load.load_drafter(
        folder, target_and_params[0], compute_dtype="bfloat16"
    )
    assert drafter.config.param_dtype == drafter.config.compute_dtype == "bfloat16"


def test_a_narrow_computation_keeps_wide_weights(target_and_params, folder):
    target = decoder.make_target(
        dataclasses.replace(target_and_params[0].config, compute_dtype="bfloat16")
    )
    drafter, params = load.load_drafter(folder, target)
    assert drafter.config.compute_dtype == "bfloat16"
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("float32")}


def test_a_draft_vocabulary_takes_the_most_frequent_ids(target_and_params, folder):
    target, target_params = target_and_params
    (folder / load.VOCABULARY_FILE).write_text(json.dumps({"ids": [9, 3, 70, 1]}))
    _, params = load.load_drafter(
        folder, target, target_params=target_params, draft_vocabulary=3
    )
    vocabulary = params.draft_vocabulary
    np.testing.assert_array_equal(vocabulary.ids, [3, 9, 70])
    np.testing.assert_array_equal(vocabulary.head, target_params.head[vocabulary.ids])
    np.testing.assert_array_equal(vocabulary.w2, params.markov.w2[vocabulary.ids])


@pytest.mark.parametrize(
    ("content", "count", "error", "message"),
    [
        (None, 2, FileNotFoundError, "`draft_vocabulary` needs .*which is missing"),
        (
            {"ids": [1, 2]},
            3,
            ValueError,
            r"`draft_vocabulary` must lie in 1\.\.2 .* got",
        ),
        (
            {"ids": [1, 2]},
            0,
            ValueError,
            r"`draft_vocabulary` must lie in 1\.\.2 .* got",
        ),
        ({"ids": ["a"]}, 1, ValueError, "must hold a list of integers 'ids'"),
        ({}, 1, ValueError, "must hold a list of integers 'ids'"),
        ({"ids": [1, 1]}, 2, ValueError, "'ids' must be distinct"),
        ({"ids": [1, 128]}, 2, ValueError, "'ids' must be distinct and lie in 0..127"),
        ({"ids": [1, 2**40]}, 2, ValueError, "'ids' must be distinct .* 0..127"),
    ],
)
def test_bad_draft_vocabularies_are_refused(
    target_and_params, folder, content, count, error, message
):
    target, target_params = target_and_params
    if content is not None:
        (folder / load.VOCABULARY_FILE).write_text(json.dumps(content))
    with pytest.raises(error, match=message):
        load.load_drafter(
            folder, target, target_params=target_params, draft_vocabulary=count
        )


def test_a_draft_vocabulary_needs_the_targets_parameters(target_and_params, folder):
    (folder / load.VOCABULARY_FILE).write_text(json.dumps({"ids": [1]}))
    with pytest.raises(ValueError, match="needs `target_params`, got None"):
        load.load_drafter(folder, target_and_params[0], draft_vocabulary=1)


def test_unknown_sources_are_refused(target_and_params, tmp_path):
    target = target_and_params[0]
    with pytest.raises(FileNotFoundError, match="`source` must be one of"):
        load.load_drafter("dspark-of-another-name", target)
    (tmp_path / "x.gguf").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match="`source` must be one of"):
        load.load_drafter(tmp_path / "x.gguf", target)


def test_the_folder_of_a_run_names_its_drafters(target_and_params, tmp_path):
    for name in ("a", "b"):
        (tmp_path / "drafters" / name).mkdir(parents=True)
        (tmp_path / "drafters" / name / "config.json").write_text("{}")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"of a training run, .*drafters/a, .*s/b$"):
        load.load_drafter(tmp_path, target_and_params[0])


def test_a_missing_shipped_drafter_is_named(target_and_params, monkeypatch):
    monkeypatch.setattr(load, "SHIPPED", ("dspark-none",))
    with pytest.raises(
        FileNotFoundError, match="shipped drafter 'dspark-none' is miss"
    ):
        load.load_drafter("dspark-none", target_and_params[0])


@pytest.mark.slow
def test_the_shipped_drafter_fits_the_default_target():
    if not load._shipped_folder("dspark-smollm2-135m").is_dir():
        pytest.skip("no drafter is shipped yet")
    if not (fetch.cache_dir() / fetch.FILE_NAME).is_file():
        pytest.skip("the default target is not in the cache")
    target, target_params = load_target("smollm2-135m")
    drafter, params = load.load_drafter(
        "dspark-smollm2-135m", target, target_params=target_params
    )
    assert drafter.config.target_fingerprint == target.config.fingerprint
    assert params.embed is None
    assert params.head is None
