"""State files, exports and pieces."""

import hashlib
import tarfile

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.interop import deepspec
from dspark_jax.training import data, saving, settings, smoke, step
from dspark_jax.training import run as run_lib
from dspark_jax.training.settings import DrafterSpec, RunConfig

RUN = RunConfig(
    target="tiny",
    drafters=(DrafterSpec(name="a", num_layers=1, markov_rank=4),),
    train=settings.TrainConfig(),
    block_size=3,
    mask_token=16,
    tap_layers=(0, 2),
    compute_dtype="float32",
)


@pytest.fixture(name="parts", scope="module")
def _parts():
    target, params = smoke.random_target(smoke.TINY, "float32")
    drafters = settings.drafter_configs(RUN, target)
    return drafters[0], run_lib.initial_params(RUN, drafters, params)


def test_state_comes_back(tmp_path, parts):
    state = step.init_state(parts[1], settings.TrainConfig())
    saving.save_state(tmp_path / "s.safetensors", state, {"total": np.int64(9)})
    empty = jax.tree.map(jnp.zeros_like, state)
    found, numbers = saving.load_state(tmp_path / "s.safetensors", empty)
    chex.assert_trees_all_equal(found, state)
    assert int(numbers["total"]) == 9
    assert [p.name for p in tmp_path.iterdir()] == ["s.safetensors"]


def test_state_of_another_run_is_refused(tmp_path):
    saving.save_state(tmp_path / "s.safetensors", {"a": jnp.ones(3)}, {})
    with pytest.raises(
        ValueError, match=r"'a' should have shape \(2,\), it has \(3,\)"
    ):
        saving.load_state(tmp_path / "s.safetensors", {"a": jnp.ones(2)})
    with pytest.raises(ValueError, match=r"'b' should have shape \(2,\), it has None"):
        saving.load_state(
            tmp_path / "s.safetensors", {"a": jnp.ones(3), "b": jnp.ones(2)}
        )


def test_rows_come_back(tmp_path):
    tokens = jnp.arange(33, dtype=jnp.uint16).reshape(3, 11)
    rows = data.Rows(tokens=tokens, loss_mask=tokens % 3 == 0)
    saving.save_rows(tmp_path / "rows.npz", rows)
    chex.assert_trees_all_equal(saving.load_rows(tmp_path / "rows.npz"), rows)


def test_export_is_a_deepspec_folder(tmp_path, parts):
    config, (params,) = parts
    saving.export(tmp_path / "a", config, params, tap_scale=(2.0, 0.5), dtype="float32")
    found_config, found, _ = deepspec.load(tmp_path / "a")
    assert found_config.tap_layers == config.tap_layers
    assert found.embed is None
    np.testing.assert_array_equal(found.markov.w2, params.markov.w2)
    half = config.width
    np.testing.assert_array_equal(
        found.backbone.fc[:, :half], 2 * params.backbone.fc[:, :half]
    )
    np.testing.assert_array_equal(
        found.backbone.fc[:, half:], params.backbone.fc[:, half:] / 2
    )


def test_pieces_join_to_a_tar(tmp_path):
    content = np.random.default_rng(0).bytes(5000)
    (tmp_path / "x.bin").write_bytes(content)
    count = saving.write_pieces(
        tmp_path / "out", {"x.bin": tmp_path / "x.bin"}, piece_bytes=3000
    )
    assert count > 1
    joined = b"".join(
        (tmp_path / "out" / f"export.tar.part{i}").read_bytes() for i in range(count)
    )
    listed = (tmp_path / "out" / "export.tar.sha256").read_text()
    assert listed.startswith(hashlib.sha256(joined).hexdigest())
    (tmp_path / "joined.tar").write_bytes(joined)
    with tarfile.open(tmp_path / "joined.tar") as archive:
        assert archive.extractfile("x.bin").read() == content
