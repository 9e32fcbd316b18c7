"""Checkpoints, corpora and exports."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.interop import deepspec
from dspark_jax.training import settings, step
from dspark_jax.training.runs import run_config, saving
from dspark_jax.training.texts import data


@pytest.fixture(name="drafter", scope="module")
def _drafter(root, tiny):
    target, params = tiny.random_target()
    config = run_config.drafter_configs(tiny.config(root), target)[0]
    # On the host: a test donates its copy.
    return config, jax.device_get(
        step.init_params(jax.random.key(0), config, params.final_norm)
    )


def test_state_comes_back_although_it_was_donated(tmp_path, drafter):
    params = jax.tree.map(jnp.asarray, drafter[1])
    state = step.init_state((params,), settings.TrainConfig())
    expected = jax.device_get(state)
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )
    double = jax.jit(lambda s: jax.tree.map(lambda x: x + x, s), donate_argnums=0)
    with saving.Checkpoints(tmp_path / "c") as checkpoints:
        checkpoints.save(3, state)
        for _ in range(3):
            state = double(state)
    with saving.Checkpoints(tmp_path / "c") as checkpoints:
        assert checkpoints.steps == (3,)
        chex.assert_trees_all_equal(checkpoints.load(3, like), expected)


def test_kept_checkpoints(tmp_path):
    with saving.Checkpoints(tmp_path, keep_last=2, keep_every=10) as checkpoints:
        for index in (5, 10, 15, 20, 23, 26):
            checkpoints.save(index, {"a": jnp.ones(3)})
    with saving.Checkpoints(tmp_path, keep_last=2, keep_every=10) as checkpoints:
        assert checkpoints.steps == (10, 20, 23, 26)


def test_state_of_another_run_is_refused(tmp_path):
    with saving.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"a": jnp.ones(3)})
        with pytest.raises(
            ValueError, match=r"'a' should be float32 \(2,\), it is float32 \(3,\)"
        ):
            checkpoints.load(1, {"a": jnp.ones(2)})
        with pytest.raises(ValueError, match=r"'b' should be .*, it is None"):
            checkpoints.load(1, {"a": jnp.ones(3), "b": jnp.ones(3)})


def test_rows_come_back(tmp_path):
    tokens = np.arange(33, dtype=np.uint16).reshape(3, 11)
    rows = data.Rows(tokens=tokens, loss_mask=tokens % 3 == 0)
    saving.save_rows(tmp_path / "rows.npz", rows, 7)
    found, count = saving.load_rows(tmp_path / "rows.npz")
    chex.assert_trees_all_equal(found, rows)
    assert count == 7


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (None, "is not a corpus of rows"),
        ({"tokens": np.zeros((2, 3), np.int32)}, "loss_mask is not a file"),
        (
            {
                "tokens": np.zeros((2, 9), np.int32),
                "loss_mask": np.zeros((2, 1), np.uint8),
                "num_batches": 1,
            },
            r"tokens are int32 \(2, 9\), the mask's bits uint8 \(2, 1\)",
        ),
    ],
)
def test_damaged_corpora(tmp_path, arrays, message):
    path = tmp_path / "corpus.npz"
    if arrays is None:
        path.write_bytes(b"PK\3\4 cut off")
    else:
        np.savez(path, **arrays)
    with pytest.raises(ValueError, match=message):
        saving.load_rows(path)


def test_export_is_a_deepspec_folder(tmp_path, drafter):
    config, params = drafter
    scale = (2.0, 0.5, 1.0)
    saving.export(tmp_path / "a", config, params, tap_scale=scale, dtype="float32")
    found_config, found, _ = deepspec.load(tmp_path / "a")
    assert found_config.tap_layers == config.tap_layers
    assert found.embed is None
    np.testing.assert_array_equal(found.markov.w2, params.markov.w2)
    factors = np.repeat(np.asarray(scale, np.float32), config.width)
    np.testing.assert_array_equal(
        found.backbone.fc, np.asarray(params.backbone.fc) * factors
    )
