"""A training run small enough for a CPU: target, tokenizer, configuration, folder."""

import dataclasses

import jax

from dspark_jax.config import BlockConfig, DecoderConfig
from dspark_jax.targets import decoder
from dspark_jax.training.runs import run_config

TARGET = DecoderConfig(
    vocab_size=512,
    num_layers=4,
    block=BlockConfig(
        width=48, num_heads=3, num_kv_heads=1, head_width=16, ffn_width=64
    ),
    max_position=256,
    tied_embeddings=False,  # tied random ones repeat the last token
    stop_tokens=(2, 0),
)
CHANGES = (
    'compute_dtype="float32"',
    "tap_layers=[0, 1, 2]",
    "row_length=80",
    "write_rows=16",
    "max_rows=32",
    "max_prefix=48",
    "max_user=6",
    "held_out_rows=8",
    "batch_rows=4",
    "log_every=2",
    "steps=6",
    "data_parallel=1",
    "drafters.0.num_layers=1",
    "drafters.1.num_layers=1",
    "train.num_anchors=8",
    "train.chunk_logits=500_000",
    "train.attention=xla",
)
# A command line needs files: the golden Qwen3 has 128 tokens.
COMMAND_CHANGES = (
    *CHANGES[:-5],
    "mask_token=125",
    "never_sampled=[125]",
    'drafters=[{name="a", num_layers=1, markov_rank=4}]',
    "train.num_anchors=8",
    "train.chunk_logits=500_000",
    "train.attention=xla",
)


class ByteTokenizer:
    """Bytes as ids 17…, with SmolLM2's control tokens: no files needed."""

    def encode_chat(self, messages, add_generation_prompt=True):
        ids = []
        for message in [{"role": "system", "content": "Hi"}, *messages]:
            text = f"{message['role']}\n{message['content']}"
            ids += [1, *_bytes(text), 2, *_bytes("\n")]
        return ids + ([1, *_bytes("assistant\n")] if add_generation_prompt else [])


def random_target():
    """Random weights; a large last gain makes the distributions peaked."""
    params = decoder.init(jax.random.key(0), TARGET)
    params = dataclasses.replace(params, final_norm=20 * params.final_norm)
    return decoder.make_target(TARGET), params


def config(root, *changes):
    path = root / "tests" / "training" / "two_drafters.toml"
    return run_config.load(path, [*CHANGES, *changes])


def replaced(found, **changes):
    return dataclasses.replace(found, **changes)


def _bytes(text):
    return [17 + byte for byte in text.encode()]
