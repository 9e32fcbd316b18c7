"""The objective against DeepSpec's golden files: every tensor, loss and gradient."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import layers
from dspark_jax.drafters import backbone
from dspark_jax.training import anchors as anchors_lib
from dspark_jax.training import losses, objective, settings, vocabulary

pytestmark = pytest.mark.usefixtures("quick_compilation")

# All nine golden cases pass; three are stored here.
CASES = ("dspark_vanilla_b7", "dspark_gated_b4", "dspark_rnn_b4")
GRADIENT = {"atol": 2e-6, "rtol": 1e-3}


@pytest.mark.parametrize("name", CASES)
def test_forward_equals_deepspec(load_case, name):
    case = load_case(name)
    keep = case.tensors["in.block_keep_mask"] > 0
    blocks = anchors_lib.make_blocks(
        case.batch.tokens,
        case.batch.loss_mask,
        case.anchors,
        block_size=case.config.block_size,
        mask_token=case.config.mask_token,
    )
    inputs = case.embed(blocks.inputs)
    rows, confidence = objective.draft_rows(
        case.params,
        case.config,
        blocks,
        case.anchors,
        case.states,
        inputs,
        recipe=settings.Recipe(),
        config=case.train_config(),
    )
    terms = vocabulary.reference_terms(
        rows,
        case.head,
        anchors_lib.target_rows(case.states.hidden, blocks),
        blocks.labels,
    )
    backbone_params = case.params.backbone
    fc = layers.dot(case.states.taps, backbone_params.fc)
    context = backbone.context_features(backbone_params, case.config, case.states.taps)
    for found, key in ((fc, "fc_output"), (context, "context_features")):
        np.testing.assert_allclose(found, case.tensors[f"mid.{key}"], atol=1e-4)
    eps = case.config.block.rms_eps
    for layer in range(case.config.num_layers):
        # The backbone cut after this layer; its last norm without a gain.
        cut = backbone_params.replace(
            layers=backbone_params.layers[: layer + 1],
            final_norm=jnp.ones_like(backbone_params.final_norm),
        )
        shorter = dataclasses.replace(case.config, num_layers=layer + 1)
        hidden = objective.draft_rows(
            case.params.replace(backbone=cut),
            shorter,
            blocks,
            case.anchors,
            case.states,
            inputs,
            recipe=settings.Recipe(),
            config=case.train_config(),
        )[0].hidden
        theirs = jnp.asarray(case.tensors[f"mid.draft_layer_{layer}_output"])
        theirs = theirs.reshape(hidden.shape)
        expected = layers.rms_norm(theirs, cut.final_norm, eps)
        np.testing.assert_allclose(hidden[keep], expected[keep], atol=1e-4)
    weights = losses.slot_weights(blocks.is_supervised, case.hyper["loss_decay_gamma"])
    for ours, key, atol in (
        (rows.hidden, "mid.output_hidden", 1e-4),
        (terms.base_logits, "mid.base_logits", 1e-4),
        (terms.draft_logits, "out.draft_logits", 1e-4),
        (terms.target_logits, "out.aligned_target_logits", 1e-4),
        (confidence, "out.confidence_logits", 1e-4),
        (losses.accept_rate(terms.l1), "mid.accept_rate", 1e-5),
        (weights, "mid.loss_weight_mask", 1e-6),
    ):
        np.testing.assert_allclose(
            np.asarray(ours)[keep], case.tensors[key][keep], atol=atol, err_msg=key
        )


@pytest.mark.parametrize("name", CASES)
def test_losses_metrics_and_gradients_equal_deepspec(load_case, name):
    case = load_case(name)
    gradient, outcome = case.gradients(case.train_config())
    train = case.train
    np.testing.assert_allclose(outcome.loss, train["total_loss"], rtol=1e-5)
    for key in ("ce_loss", "l1_loss", "confidence_loss"):
        top, bottom = outcome.metrics[key]
        np.testing.assert_allclose(top, train["loss_terms"][f"{key}_num"], rtol=1e-5)
        np.testing.assert_allclose(bottom, train["loss_terms"][f"{key}_den"], rtol=1e-5)
    for key, (top, bottom) in outcome.metrics.items():
        ratio = np.asarray(top) / np.asarray(bottom)
        if key == "accept_rate":
            theirs = [
                train["metrics"][f"train/accept_rate@{slot}"]
                for slot in range(case.config.block_size)
            ]
        else:
            theirs = train["metrics"][f"train/{key}"]
        np.testing.assert_allclose(ratio, theirs, rtol=1e-5, err_msg=key)
    expected = case.expected_gradients
    checked = 0
    for key, theirs in expected.items():
        if key.startswith("total/"):
            ours = gradient[key.removeprefix("total/")]
            np.testing.assert_allclose(ours, theirs, **GRADIENT, err_msg=key)
            checked += 1
    assert checked == len(gradient)
    norm = np.sqrt(sum(np.sum(np.square(x)) for x in gradient.values()))
    np.testing.assert_allclose(norm, train["grad_global_norm"], rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "term"),
    [
        ("dspark_vanilla_b7", "ce_only"),
        ("dspark_vanilla_b7", "l1_only"),
        ("dspark_vanilla_b7", "conf_only"),
        ("dspark_vanilla_b7", "no_decay"),
        ("dspark_gated_b4", "l1_only"),
        ("dspark_rnn_b4", "conf_only"),
    ],
)
def test_single_terms_equal_deepspec(load_case, name, term):
    case = load_case(name)
    about = case.train["single_term_runs"][term]
    keys = {
        "ce_loss_alpha": "ce_weight",
        "l1_loss_alpha": "l1_weight",
        "confidence_head_alpha": "confidence_weight",
        "loss_decay_gamma": "decay",
    }
    changes = {ours: about[theirs] for theirs, ours in keys.items() if theirs in about}
    gradient, outcome = case.gradients(case.train_config(**changes))
    np.testing.assert_allclose(outcome.loss, about["loss"], rtol=1e-5)
    expected = case.expected_gradients
    found = {k: v for k, v in expected.items() if k.startswith(f"{term}/")}
    assert found
    for key, theirs in found.items():
        ours = gradient[key.removeprefix(f"{term}/")]
        np.testing.assert_allclose(ours, theirs, **GRADIENT, err_msg=key)
