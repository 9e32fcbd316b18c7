"""Warm starts: what is taken over, what starts afresh, what is refused."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.training import anchors as anchors_lib
from dspark_jax.training import (
    objective,
    settings,
    step,
    target_states,
    vocabulary,
    warm_start,
)
from dspark_jax.training.runs import saving

pytestmark = pytest.mark.usefixtures("quick_compilation")


def fresh_params(drafter, seed):
    return step.init_params(jax.random.key(seed), drafter)


@pytest.fixture(name="small", scope="session")
def _small(small):
    """With q and k norms, which DeepSpec's layout asks for."""
    target, params, drafters, batch = small
    drafters = tuple(
        dataclasses.replace(d, block=dataclasses.replace(d.block, qk_norm=True))
        for d in drafters
    )
    return target, params, drafters, batch


@pytest.fixture(name="folder")
def _folder(small, tmp_path):
    _, _, drafters, _ = small
    for name, drafter in zip(("dspark", "dflash"), drafters, strict=True):
        params = fresh_params(drafter, 5)
        saving.export(tmp_path / name, drafter, params, (2.0, 0.5), dtype="float32")
    return tmp_path


def test_everything_is_taken_over(small, folder):
    _, _, drafters, _ = small
    found = warm_start.load(
        folder / "dspark", drafters[0], fresh_params(drafters[0], 6), (2.0, 0.5)
    )
    chex.assert_trees_all_equal(found, fresh_params(drafters[0], 5))


def test_a_missing_head_starts_afresh(small, folder):
    _, _, drafters, _ = small
    fresh = fresh_params(drafters[0], 6)
    found = warm_start.load(folder / "dflash", drafters[0], fresh, (2.0, 0.5))
    chex.assert_trees_all_equal(found.markov, fresh.markov)
    chex.assert_trees_all_equal(found.confidence, fresh.confidence)
    chex.assert_trees_all_equal(found.backbone, fresh_params(drafters[1], 5).backbone)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 2}, "has num_layers = 1, the drafter to train has 2"),
        ({"tap_layers": (0, 1)}, r"has tap_layers = \(0, 2\), the .* has \(0, 1\)"),
    ],
)
def test_other_drafters_are_refused(small, folder, changes, message):
    _, _, drafters, _ = small
    other = dataclasses.replace(drafters[0], **changes)
    with pytest.raises(ValueError, match=message):
        warm_start.load(folder / "dspark", other, fresh_params(drafters[0], 6))


def test_no_folder(small, tmp_path):
    _, _, drafters, _ = small
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        warm_start.load(tmp_path / "none", drafters[0], fresh_params(drafters[0], 6))


def gradient(small, recipe):
    target, target_params, drafters, batch = small
    config = settings.TrainConfig(num_anchors=4)

    @jax.jit
    @jax.grad
    def loss(params):
        states = target_states.compute(target, target_params, batch, (0, 2))
        anchors = anchors_lib.sample(jax.random.key(0), batch.loss_mask, 4)
        (outcome,) = objective.evaluate(
            (params,),
            batch,
            states,
            anchors,
            functools.partial(target.embed, target_params),
            vocabulary.head_matrix(target, target_params),
            jnp.full(1, 0.1, jnp.float32),
            drafters=drafters[:1],
            recipes=(recipe,),
            config=config,
        )
        return outcome.loss

    return loss(fresh_params(drafters[0], 5))


def test_heads_only_leaves_the_backbone(small):
    """Its gradient is zero, and the heads' is what it was."""
    found = gradient(small, settings.Recipe(trainable="heads"))
    whole = gradient(small, settings.Recipe())
    assert not any(np.any(np.asarray(x)) for x in jax.tree.leaves(found.backbone))
    assert any(np.any(np.asarray(x)) for x in jax.tree.leaves(whole.backbone))
    chex.assert_trees_all_close(found.markov, whole.markov, atol=1e-7)
    chex.assert_trees_all_close(found.confidence, whole.confidence, atol=1e-7)


def test_cut_confidence_changes_the_backbone_as_no_confidence_does(small):
    cut = settings.LossConfig(cut_confidence=True)
    without = settings.LossConfig(confidence_weight=0.0)
    found = gradient(small, settings.Recipe(loss=cut))
    expected = gradient(small, settings.Recipe(loss=without))
    chex.assert_trees_all_close(found.backbone, expected.backbone, atol=1e-7)
    chex.assert_trees_all_close(found.markov, expected.markov, atol=1e-7)
    assert any(np.any(np.asarray(x)) for x in jax.tree.leaves(found.confidence))
