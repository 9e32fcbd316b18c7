"""Golden training cases, and a small target with two drafters."""

import dataclasses
import functools
import json
import pathlib
import types

import jax
import jax.numpy as jnp
import pytest
import safetensors.numpy
import tiny_runs

import dspark_jax
from dspark_jax import layers
from dspark_jax.config import BlockConfig, DecoderConfig, DrafterConfig
from dspark_jax.interop import deepspec
from dspark_jax.targets import decoder
from dspark_jax.training import anchors, settings, step, target_states


@dataclasses.dataclass
class Case:
    """One golden case: a drafter and a batch with given anchors and target states."""

    config: DrafterConfig
    params: object  # DSparkParams without tables
    table: jax.Array  # the embedding
    head: jax.Array
    batch: target_states.Batch
    states: target_states.TargetStates
    anchors: anchors.Anchors
    tensors: dict
    hyper: dict
    train: dict
    expected_gradients: dict

    @property
    def target(self):
        """As much of a Target as a step with given states needs."""
        return types.SimpleNamespace(embed=lambda _, ids: self.embed(ids))

    def embed(self, ids):
        return layers.embed(self.table, ids, jnp.float32)

    def train_config(self, **changes):
        loss = {
            "ce_weight": self.hyper["ce_loss_alpha"],
            "l1_weight": self.hyper["l1_loss_alpha"],
            "confidence_weight": self.hyper["confidence_head_alpha"],
            "decay": self.hyper["loss_decay_gamma"],
        }
        loss |= {name: changes.pop(name) for name in loss if name in changes}
        given = {"num_anchors": self.hyper["num_anchors"], "chunk_logits": 30 * 128}
        loss["decay"] = loss["decay"] or 0.0  # DeepSpec: None switches it off
        loss = settings.LossConfig(**loss)
        return settings.TrainConfig(**(given | changes), loss=loss)

    def gradients(self, config, params=None, rows=None):
        """Gradients under DeepSpec's names, and the outcome."""
        rows = (self.batch, self.states, self.anchors) if rows is None else rows

        @jax.jit
        def run(params, rows, head, ce):
            return step.gradients(
                (params,),
                *rows,
                self.embed,
                head,
                ce,
                drafters=(self.config,),
                recipes=(settings.Recipe(loss=config.loss),),
                config=config,
            )

        params = self.params if params is None else params
        ce = jnp.asarray([config.loss.ce_weight], jnp.float32)
        (gradient,), (outcome,) = run(params, rows, self.head, ce)
        return self.named(gradient), outcome

    def named(self, params):
        return deepspec._tensors(self.config, params)


@pytest.fixture(scope="session")
def load_case(golden):
    @functools.cache
    def load(name):
        folder = golden / "cases" / name
        config, params, _ = deepspec.load(folder / "drafter")
        found = safetensors.numpy.load_file(folder / "train.safetensors")
        about = json.loads((folder / "case.json").read_text())
        return Case(
            config=config,
            params=params.replace(embed=None, head=None),
            table=params.embed,
            head=params.head,
            batch=target_states.Batch(
                tokens=jnp.asarray(found["in.input_ids"]),
                loss_mask=jnp.asarray(found["in.loss_mask"] > 0),
            ),
            states=target_states.TargetStates(
                taps=jnp.asarray(found["in.target_hidden_states"]),
                hidden=jnp.asarray(found["in.target_last_hidden_states"]),
            ),
            anchors=anchors.Anchors(
                positions=jnp.asarray(found["in.anchor_positions"]),
                keep=jnp.asarray(found["in.block_keep_mask"] > 0),
            ),
            tensors=found,
            hyper=about["hyper"],
            train=about["train"],
            expected_gradients=safetensors.numpy.load_file(
                folder / "grads.safetensors"
            ),
        )

    return load


@pytest.fixture(scope="session")
def small():
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
    batch = target_states.Batch(tokens=tokens, loss_mask=jnp.ones((8, 20), jnp.bool_))
    return target, params, drafters, batch


@pytest.fixture(scope="session")
def tiny():
    """The module of that name, as a fixture."""
    return tiny_runs


@dataclasses.dataclass
class ChatTarget:
    """A tiny target with a byte tokenizer and a ChatML template."""

    folder: pathlib.Path
    target: object
    params: object
    tokenizer: object


@pytest.fixture(scope="session")
def chat_target(chat_folder):
    target, params = dspark_jax.load_target(chat_folder)
    return ChatTarget(
        chat_folder, target, params, dspark_jax.load_tokenizer(chat_folder)
    )
