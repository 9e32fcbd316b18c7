"""Training steps against DeepSpec's golden files, on one device and on several."""

import dataclasses
import functools
import json

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from dspark_jax import layers
from dspark_jax.config import BlockConfig, DecoderConfig, DrafterConfig
from dspark_jax.drafters import backbone
from dspark_jax.interop import deepspec
from dspark_jax.targets import decoder
from dspark_jax.training import anchors as anchors_lib
from dspark_jax.training import losses, step

# All nine golden cases pass; three are stored here.
CASES = ("dspark_vanilla_b7", "dspark_gated_b4", "dspark_rnn_b4")
GRADIENT = {"atol": 2e-6, "rtol": 1e-3}


@dataclasses.dataclass
class Case:
    config: DrafterConfig
    params: object  # DSparkParams without tables
    frozen: step.Frozen
    batch: step.Batch
    states: step.TargetStates
    anchors: anchors_lib.Anchors
    tensors: dict
    hyper: dict
    train: dict

    def train_config(self, **changes):
        hyper = self.hyper
        settings = {
            "num_anchors": hyper["num_anchors"],
            "ce_weight": hyper["ce_loss_alpha"],
            "l1_weight": hyper["l1_loss_alpha"],
            "confidence_weight": hyper["confidence_head_alpha"],
            "loss_decay": hyper["loss_decay_gamma"],
            "chunk_slots": 30,
        }
        return step.TrainConfig(**(settings | changes))

    def gradients(self, train_config):
        ce = jnp.float32(train_config.ce_weight)
        run = jax.jit(
            lambda params: step.gradients(
                (params,),
                self.batch,
                self.states,
                self.anchors,
                None,
                None,
                self.frozen,
                ce,
                drafters=(self.config,),
                config=train_config,
            )
        )
        (gradient,), (outcome,) = run(self.params)
        return named(self.config, gradient), outcome


@pytest.fixture(name="load", scope="module")
def _load(golden):
    @functools.cache
    def load(name):
        folder = golden / "cases" / name
        config, params, _ = deepspec.load(folder / "drafter")
        found = safetensors.numpy.load_file(folder / "train.safetensors")
        about = json.loads((folder / "case.json").read_text())
        return Case(
            config=config,
            params=params.replace(embed=None, head=None),
            frozen=step.Frozen(params.embed, params.head),
            batch=step.Batch(
                tokens=jnp.asarray(found["in.input_ids"]),
                loss_mask=jnp.asarray(found["in.loss_mask"] > 0),
            ),
            states=step.TargetStates(
                taps=jnp.asarray(found["in.target_hidden_states"]),
                hidden=jnp.asarray(found["in.target_last_hidden_states"]),
            ),
            anchors=anchors_lib.Anchors(
                positions=jnp.asarray(found["in.anchor_positions"]),
                keep=jnp.asarray(found["in.block_keep_mask"] > 0),
            ),
            tensors=found,
            hyper=about["hyper"],
            train=about["train"],
        )

    return load


def named(config, params):
    """Arrays under DeepSpec's names."""
    return deepspec._tensors(config, params)


@pytest.mark.parametrize("name", CASES)
def test_forward_equals_deepspec(load, name):
    case = load(name)
    keep = case.tensors["in.block_keep_mask"] > 0
    blocks = anchors_lib.make_blocks(
        case.batch.tokens,
        case.batch.loss_mask,
        case.anchors,
        block_size=case.config.block_size,
        mask_token=case.config.mask_token,
    )
    rows, confidence = step.draft_rows(
        case.params,
        case.config,
        blocks,
        case.anchors,
        case.states,
        None,
        None,
        case.frozen,
    )
    terms = losses.reference_terms(
        rows,
        case.frozen.head,
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
        hidden = step.draft_rows(
            case.params.replace(backbone=cut),
            shorter,
            blocks,
            case.anchors,
            case.states,
            None,
            None,
            case.frozen,
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
def test_losses_metrics_and_gradients_equal_deepspec(load, golden, name):
    case = load(name)
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
    expected = safetensors.numpy.load_file(
        golden / "cases" / name / "grads.safetensors"
    )
    checked = 0
    for key, theirs in expected.items():
        if key.startswith("total/"):
            ours = gradient[key.removeprefix("total/")]
            np.testing.assert_allclose(ours, theirs, **GRADIENT, err_msg=key)
            checked += 1
    assert checked == len(gradient)
    norm = np.sqrt(sum(np.sum(np.square(x)) for x in gradient.values()))
    np.testing.assert_allclose(norm, train["grad_global_norm"], rtol=1e-4)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("term", ["ce_only", "l1_only", "conf_only", "no_decay"])
def test_single_terms_equal_deepspec(load, golden, name, term):
    case = load(name)
    about = case.train["single_term_runs"][term]
    keys = {
        "ce_loss_alpha": "ce_weight",
        "l1_loss_alpha": "l1_weight",
        "confidence_head_alpha": "confidence_weight",
        "loss_decay_gamma": "loss_decay",
    }
    changes = {ours: about[theirs] for theirs, ours in keys.items() if theirs in about}
    gradient, outcome = case.gradients(case.train_config(**changes))
    np.testing.assert_allclose(outcome.loss, about["loss"], rtol=1e-5)
    expected = safetensors.numpy.load_file(
        golden / "cases" / name / "grads.safetensors"
    )
    found = {k: v for k, v in expected.items() if k.startswith(f"{term}/")}
    assert found
    for key, theirs in found.items():
        ours = gradient[key.removeprefix(f"{term}/")]
        np.testing.assert_allclose(ours, theirs, **GRADIENT, err_msg=key)


@pytest.mark.parametrize("name", ["dspark_vanilla_b7", "dspark_rnn_b4"])
def test_optimizer_equals_deepspec(load, golden, name):
    """AdamW, clipping and accumulation over several steps of given anchors."""
    case = load(name)
    about = json.loads((golden / "optimizer" / f"{name}.json").read_text())
    found = safetensors.numpy.load_file(golden / "optimizer" / f"{name}.safetensors")
    train_config = case.train_config(
        clip_norm=about["max_grad_norm"],
        beta1=about["betas"][0],
        beta2=about["betas"][1],
        weight_decay=about["weight_decay"],
    )
    accumulation = about.get("accumulation", 1)

    def split(x):  # micro-batch i is row i alone
        return x if accumulation == 1 else x[:, None]

    @jax.jit
    def run(state, anchors, rate):
        return step.train_step(
            jax.random.key(0),
            state,
            jax.tree.map(split, case.batch),
            None,
            rate,
            target=None,
            drafters=(case.config,),
            config=train_config,
            frozen=case.frozen,
            states=jax.tree.map(split, case.states),
            anchors=jax.tree.map(split, anchors),
        )

    state = step.init_state((case.params,), train_config)
    for index, rate in enumerate(about["lr_used"]):
        anchors = anchors_lib.Anchors(
            positions=jnp.asarray(found["anchor_positions"][index]),
            keep=jnp.asarray(found["block_keep_mask"][index] > 0),
        )
        state, (outcome,) = run(state, anchors, jnp.float32(rate))
        expected = np.mean(about["losses"][index])
        np.testing.assert_allclose(outcome.loss, expected, rtol=1e-4)
        norm = about["grad_norm_before_clip"][index]
        np.testing.assert_allclose(outcome.gradient_norm, norm, rtol=1e-3)
        stage = {0: "after_step1/", len(about["lr_used"]) - 1: "final/"}.get(index)
        if stage is not None:
            ours = named(case.config, state.params[0])
            for key in (k for k in found if k.startswith(stage)):
                np.testing.assert_allclose(
                    ours[key.removeprefix(stage)], found[key], atol=2e-5, err_msg=key
                )
    assert int(state.step) == len(about["lr_used"])


def test_learning_rates_equal_deepspec(golden):
    found = json.loads((golden / "optimizer" / "lr_schedule.json").read_text())
    for schedule in found["schedules"]:
        config = step.TrainConfig(
            learning_rate=schedule["lr"], warmup_share=schedule["warmup_ratio"]
        )
        total = schedule["total_steps"]
        ours = [
            step.learning_rate(i, total, config)
            for i in range(len(schedule["plain_warmup_cosine"]))
        ]
        np.testing.assert_allclose(ours, schedule["plain_warmup_cosine"], rtol=1e-9)


def test_two_devices_equal_two_ranks(load, golden):
    """Rows sharded over a mesh: the gradient of DeepSpec's two processes, and of one."""
    case = load("dspark_vanilla_b7")
    expected = safetensors.numpy.load_file(
        golden / "distributed" / "dspark_vanilla_b7_two_rank_grads.safetensors"
    )
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    by_row = NamedSharding(mesh, P("data"))
    everywhere = NamedSharding(mesh, P())
    rows = jax.device_put((case.batch, case.states, case.anchors), by_row)
    params, frozen = jax.device_put((case.params, case.frozen), everywhere)
    train_config = case.train_config()

    @functools.partial(jax.jit, out_shardings=everywhere)
    def run(params, rows, frozen):
        return step.gradients(
            (params,),
            *rows,
            None,
            None,
            frozen,
            jnp.float32(0.1),
            drafters=(case.config,),
            config=train_config,
        )

    (gradient,), (outcome,) = run(params, rows, frozen)
    about = json.loads(
        (golden / "distributed" / "dspark_vanilla_b7_two_rank.json").read_text()
    )
    np.testing.assert_allclose(
        outcome.loss, about["mean_of_backward_losses"], rtol=1e-5
    )
    ours = named(case.config, gradient)
    for key, theirs in expected.items():
        name = key.split("/", 1)[-1]
        np.testing.assert_allclose(ours[name], theirs, **GRADIENT, err_msg=key)
    chex.assert_trees_all_close(ours, case.gradients(train_config)[0], atol=1e-6)


@pytest.fixture(name="small", scope="module")
def _small():
    block = BlockConfig(
        width=16, num_heads=2, num_kv_heads=1, head_width=8, ffn_width=24
    )
    config = DecoderConfig(vocab_size=29, num_layers=3, block=block, max_position=64)
    target, params = (
        decoder.make_target(config),
        decoder.init(jax.random.key(0), config),
    )
    drafters = tuple(
        DrafterConfig(
            vocab_size=29,
            num_layers=1,
            block=block,
            max_position=64,
            block_size=3,
            mask_token=1,
            tap_layers=(0, 2),
            num_target_layers=3,
            markov_kind=kind,
            markov_rank=rank,
            confidence_kind=confidence,
        )
        for kind, rank, confidence in (("vanilla", 4, "markov"), ("none", 0, "plain"))
    )
    tokens = jax.random.randint(jax.random.key(1), (8, 20), 0, 29)
    batch = step.Batch(tokens=tokens, loss_mask=jnp.ones((8, 20), jnp.bool_))
    return target, params, drafters, batch


def make_state(small, config):
    _, target_params, drafters, _ = small
    params = tuple(
        step.init_params(jax.random.key(i), d, target_params.final_norm)
        for i, d in enumerate(drafters)
    )
    return step.init_state(params, config)


def test_the_target_pass_equals_one_with_a_cache(small):
    target, params, drafters, batch = small
    states = step.target_states(target, params, batch, drafters, step.TrainConfig())
    positions = jnp.broadcast_to(jnp.arange(20, dtype=jnp.int32)[None], (8, 20))
    hidden, taps, _ = target.forward(
        params, batch.tokens, positions, target.init_cache(8, 20), tap_layers=(0, 2)
    )
    np.testing.assert_allclose(states.hidden, hidden, atol=1e-5)
    np.testing.assert_allclose(states.taps, taps, atol=1e-5)


def test_joint_training_equals_separate_training(small):
    target, params, drafters, batch = small
    config = step.TrainConfig(num_anchors=6, tap_scale=(2.0, 0.5))

    @functools.partial(jax.jit, static_argnames=("drafters",))
    def run(state, *, drafters):
        return step.train_step(
            jax.random.key(3),
            state,
            batch,
            params,
            jnp.float32(1e-2),
            target=target,
            drafters=drafters,
            config=config,
        )

    state = make_state(small, config)
    joint, outcomes = run(state, drafters=drafters)
    for index, drafter in enumerate(drafters):
        alone = step.TrainState(
            step=state.step,
            params=state.params[index : index + 1],
            optimizer=state.optimizer[index : index + 1],
        )
        alone, (outcome,) = run(alone, drafters=(drafter,))
        np.testing.assert_allclose(outcome.loss, outcomes[index].loss, rtol=1e-5)
        chex.assert_trees_all_close(alone.params[0], joint.params[index], atol=1e-4)


def test_loss_falls_and_nothing_recompiles(small):
    target, params, drafters, batch = small
    config = step.TrainConfig(num_anchors=8, learning_rate=3e-2)

    @jax.jit
    @chex.assert_max_traces(n=1)
    def run(key, state, rate, ce):
        return step.train_step(
            key,
            state,
            batch,
            params,
            rate,
            ce,
            target=target,
            drafters=drafters,
            config=config,
        )

    state = make_state(small, config)
    found = []
    for index in range(25):
        rate = step.learning_rate(index, 25, config)
        state, outcomes = run(
            jax.random.key(index), state, jnp.float32(rate), jnp.float32(0.1)
        )
        found.append([float(outcome.loss) for outcome in outcomes])
    assert np.all(np.mean(found[-5:], axis=0) < 0.9 * np.mean(found[:3], axis=0))


def test_folding_the_tap_scale_changes_nothing(small):
    target, params, drafters, batch = small
    config = step.TrainConfig(num_anchors=4)
    states = step.target_states(target, params, batch, drafters, config)
    scale = step.measure_tap_scale(states, 2)
    assert all(np.log2(x) == round(np.log2(x)) for x in scale)
    scaled = step.scale_taps(states.taps, scale)[:, 1:]
    rms = np.sqrt(np.mean(np.square(scaled).reshape(8, 19, 2, 16), axis=(0, 1, 3)))
    assert np.all((rms > 0.7) & (rms < 1.42))
    drafter = make_state(small, config).params[0]
    raw = step.fold_tap_scale(drafter, scale).backbone
    np.testing.assert_allclose(
        backbone.context_features(raw, drafters[0], states.taps),
        backbone.context_features(
            drafter.backbone, drafters[0], step.scale_taps(states.taps, scale)
        ),
        atol=1e-6,
    )


def test_ce_weighs_more_at_the_start():
    config = step.TrainConfig(ce_start_share=0.1, ce_start_weight=1.0)
    found = [step.ce_weight(i, 50, config) for i in range(7)]
    assert found == [1.0] * 5 + [0.1] * 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"clip_norm": 0.0}, "clip_norm must be positive, got 0.0"),
        ({"warmup_share": 1.0}, r"warmup_share must lie in \[0, 1\), got 1.0"),
        ({"loss_decay": -1.0}, "loss_decay must be positive or absent, got -1.0"),
        ({"attention": "flash"}, "attention must be one of .*, got 'flash'"),
    ],
)
def test_bad_configurations(changes, message):
    with pytest.raises(ValueError, match=message):
        step.TrainConfig(**changes)


def test_drafters_must_fit_together(small):
    target, params, drafters, batch = small
    config = step.TrainConfig()
    other = dataclasses.replace(drafters[1], block_size=4)
    with pytest.raises(ValueError, match="must have one block_size, got 3 and 4"):
        step.train_step(
            jax.random.key(0),
            make_state(small, config),
            batch,
            params,
            jnp.float32(0),
            target=target,
            drafters=(drafters[0], other),
            config=config,
        )
    with pytest.raises(ValueError, match="one factor a tapped layer, got 3 for 32"):
        step.scale_taps(jnp.ones((2, 32)), (1.0, 1.0, 1.0))
