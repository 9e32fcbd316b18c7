"""Configurations: what they refuse, and the strict reader of dicts and TOML."""

import re

import pytest

import dspark_jax
from dspark_jax import config as config_lib
from dspark_jax.config import BlockConfig, DecoderConfig, DrafterConfig, RopeConfig

VOCABULARY = "0..18 (the vocabulary)"


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        (
            {"rule": "greedy"},
            ValueError,
            "rule must be one of ('token', 'block', 'seede",
        ),
        ({"draft_length": 0}, ValueError, "draft_length must be positive, got 0"),
        ({"draft_length": 2.0}, TypeError, "draft_length must be int | None, got 2.0"),
        ({"candidates": 0}, ValueError, "candidates must be positive, got 0"),
        ({"candidates": True}, TypeError, "candidates must be int | None, got True"),
        ({"keep": 0.5}, TypeError, "keep must be a function, got 0.5"),
    ],
)
def test_speculation(fields, error, message):
    with pytest.raises(error, match=re.escape(message)):
        dspark_jax.Speculation(**fields)


BLOCK = {
    "width": 8,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_width": 4,
    "ffn_width": 12,
}
DECODER = {"vocab_size": 19, "num_layers": 2, "max_position": 64, "block": BLOCK}
DRAFTER = {
    **DECODER,
    "block_size": 3,
    "mask_token": 1,
    "tap_layers": (0, 1),
    "num_target_layers": 2,
    "markov_rank": 4,
}


def built(fields):
    return {**fields, "block": BlockConfig(**fields["block"])}


CONFIGS = [
    (
        RopeConfig,
        {"kind": "yarn"},
        ValueError,
        "rope.kind must be one of ('default', 'l",
    ),
    (RopeConfig, {"theta": 0.0}, ValueError, "rope.theta must be positive, got 0.0"),
    (RopeConfig, {"theta": "1e4"}, TypeError, "theta must be float, got '1e4'"),
    (
        RopeConfig,
        {"factor": float("nan")},
        ValueError,
        "rope.factor must be positive, got nan",
    ),
    (
        RopeConfig,
        {"kind": "llama3", "low_freq_factor": 4.0},
        ValueError,
        "rope.low_freq_factor must be below rope.high_freq_factor, got 4.0 and 4.0",
    ),
    (
        RopeConfig,
        {"original_max_position": 0},
        ValueError,
        "rope.original_max_position must be positive, got 0",
    ),
    (BlockConfig, {"width": 0}, ValueError, "width must be positive, got 0"),
    (BlockConfig, {"num_heads": 2.0}, TypeError, "num_heads must be int, got 2.0"),
    (
        BlockConfig,
        {"num_kv_heads": 3},
        ValueError,
        "num_heads must be a multiple of num_kv_heads, got 2 and 3",
    ),
    (BlockConfig, {"head_width": 3}, ValueError, "head_width must be even, got 3"),
    (BlockConfig, {"qk_norm": 1}, TypeError, "qk_norm must be bool, got 1"),
    (BlockConfig, {"rope": {}}, TypeError, "rope must be RopeConfig, got {}"),
    (
        DecoderConfig,
        {"vocab_size": "19"},
        TypeError,
        "vocab_size must be int, got '19'",
    ),
    (
        DecoderConfig,
        {"num_layers": 0},
        ValueError,
        "num_layers must be positive, got 0",
    ),
    (
        DecoderConfig,
        {"stop_tokens": [2]},
        TypeError,
        "stop_tokens must be tuple[int, ...], got [2]",
    ),
    (
        DecoderConfig,
        {"stop_tokens": (19,)},
        ValueError,
        f"stop_tokens must lie in {VOCABULARY}, got 19",
    ),
    (
        DecoderConfig,
        {"compute_dtype": "float8"},
        ValueError,
        "compute_dtype must be one of ('float32', 'bfloat16', 'float16'), got 'float8'",
    ),
    (DecoderConfig, {"block": BLOCK}, TypeError, "block must be BlockConfig, got {"),
    (
        DecoderConfig,
        {"fingerprint": None},
        TypeError,
        "fingerprint must be str, got None",
    ),
    (
        DrafterConfig,
        {"mask_token": 19},
        ValueError,
        f"mask_token must lie in {VOCABULARY}, got 19",
    ),
    (
        DrafterConfig,
        {"mask_token": -1},
        ValueError,
        f"mask_token must lie in {VOCABULARY}, got -1",
    ),
    (
        DrafterConfig,
        {"block_size": 0},
        ValueError,
        "block_size must be positive, got 0",
    ),
    (
        DrafterConfig,
        {"markov_kind": "lstm"},
        ValueError,
        "markov_kind must be one of ('none', 'vanilla', 'gated', 'rnn'), got 'lstm'",
    ),
    (
        DrafterConfig,
        {"confidence_kind": "deep"},
        ValueError,
        "confidence_kind must be one of ('none', 'plain', 'markov'), got 'deep'",
    ),
    (
        DrafterConfig,
        {"markov_kind": "none", "confidence_kind": "plain"},
        ValueError,
        "markov_rank must be 0 when markov_kind is 'none', got 4",
    ),
    (
        DrafterConfig,
        {"markov_kind": "none", "markov_rank": 0},
        ValueError,
        "confidence_kind 'markov' needs a Markov head, but markov_kind is 'none'",
    ),
    (
        DrafterConfig,
        {"markov_rank": 0},
        ValueError,
        "markov_rank must be positive, got 0",
    ),
    (
        DrafterConfig,
        {"tap_layers": ()},
        ValueError,
        "tap_layers must name at least one target layer, got ()",
    ),
    (
        DrafterConfig,
        {"tap_layers": (1, 0)},
        ValueError,
        "tap_layers must be strictly increasing, got (1, 0)",
    ),
    (
        DrafterConfig,
        {"tap_layers": (0, 2)},
        ValueError,
        "tap_layers must lie in -1..1, got (0, 2)",
    ),
    (
        DrafterConfig,
        {"tap_layers": [0, 1]},
        TypeError,
        "tap_layers must be tuple[int, ...], got [0, 1]",
    ),
]


@pytest.mark.parametrize(("kind", "fields", "error", "message"), CONFIGS)
def test_configurations(kind, fields, error, message):
    base = {
        RopeConfig: {},
        BlockConfig: BLOCK,
        DecoderConfig: built(DECODER),
        DrafterConfig: built(DRAFTER),
    }[kind]
    kind(**base)
    with pytest.raises(error, match=re.escape(message)):
        kind(**{**base, **fields})


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        (
            {"vocab": 19},
            ValueError,
            "unknown key 'vocab'; known keys: block, block_size, compute_dtype,",
        ),
        (
            {"block": {**BLOCK, "rope": {"base": 1.0}}},
            ValueError,
            "unknown key 'block.rope.base'; known keys: factor, high_freq_factor, ki",
        ),
        (
            {"block": {"width": 8}},
            ValueError,
            "missing key 'block.ffn_width'",
        ),
        ({"block": 3}, TypeError, "block must be a table, got int"),
        ({"block_size": "7"}, TypeError, "block_size must be int, got '7'"),
        ({"block_size": 7.0}, TypeError, "block_size must be int, got 7.0"),
        ({"block_size": True}, TypeError, "block_size must be int, got True"),
        ({"tap_layers": 1}, TypeError, "tap_layers must be a list, got int"),
        ({"tap_layers": [0, "1"]}, TypeError, "tap_layers must be int, got '1'"),
        (
            {"markov_kind": "lstm"},
            ValueError,
            "markov_kind must be one of ('none', 'vanilla', 'gated', 'rnn'), got",
        ),
    ],
)
def test_from_dict(values, error, message):
    config_lib.from_dict(DrafterConfig, DRAFTER)
    with pytest.raises(error, match=re.escape(message)):
        config_lib.from_dict(DrafterConfig, {**DRAFTER, **values})


def test_load_toml(tmp_path):
    path = tmp_path / "drafter.toml"
    path.write_text("theta = 1e5\nkind = 'linear'\nfactor = 2\n")
    assert config_lib.load_toml(path, RopeConfig) == RopeConfig(
        theta=1e5, kind="linear", factor=2.0
    )
    path.write_text("theta = 1e5\nscale = 2\n")
    with pytest.raises(ValueError, match="unknown key 'scale'; known keys: factor, "):
        config_lib.load_toml(path, RopeConfig)
    path.write_text("theta = \n")
    with pytest.raises(ValueError, match=re.escape(f"{path} is not valid TOML: ")):
        config_lib.load_toml(path, RopeConfig)
    with pytest.raises(FileNotFoundError):
        config_lib.load_toml(tmp_path / "none.toml", RopeConfig)
