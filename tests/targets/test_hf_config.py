"""config.json to DecoderConfig: both key styles, and every refusal by name."""

import pytest

from dspark_jax import tensor_files
from dspark_jax.config import BlockConfig, DecoderConfig, RopeConfig
from dspark_jax.targets import hf_config

BASE = {
    "model_type": "qwen3",
    "hidden_act": "silu",
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 64,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def without(name):
    return {key: value for key, value in BASE.items() if key != name}


def test_every_field_arrives():
    config = hf_config.decoder_config(
        {**BASE, "tie_word_embeddings": True, "eos_token_id": 7, "dtype": "bfloat16"}
    )
    assert config == DecoderConfig(
        vocab_size=100,
        num_layers=2,
        block=BlockConfig(
            width=32,
            num_heads=4,
            num_kv_heads=2,
            head_width=16,
            ffn_width=64,
            rms_eps=1e-6,
            rope=RopeConfig(theta=10000.0),
            qk_norm=True,
        ),
        max_position=256,
        tied_embeddings=True,
        stop_tokens=(7,),
        param_dtype="bfloat16",
        compute_dtype="bfloat16",
    )


def test_both_golden_key_styles_give_one_configuration(golden):
    new, old = (
        hf_config.decoder_config(
            tensor_files.read_json(golden / "targets" / name / "config.json")
        )
        for name in ("qwen3_untied", "qwen3_tied")
    )
    assert new.block == old.block
    assert (new.tied_embeddings, old.tied_embeddings) == (False, True)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"rope_theta": 5e5}, RopeConfig(theta=5e5)),
        ({"rope_theta": None}, RopeConfig(theta=10000.0)),
        ({"rope_parameters": {"rope_theta": 5.0}}, "rope_theta must be the same in"),
        (
            {"rope_theta": None, "rope_parameters": {"rope_theta": 5.0}},
            RopeConfig(theta=5.0),
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 2}},
            RopeConfig(kind="linear", factor=2.0),
        ),
        ({"rope_scaling": {"rope_type": "default", "factor": 1.0}}, RopeConfig()),
        (
            {"rope_scaling": LLAMA3},
            RopeConfig(kind="llama3", factor=8.0, original_max_position=64),
        ),
        ({"rope_scaling": {"type": "yarn", "factor": 2}}, "rope_type must be one of"),
        ({"rope_scaling": {"type": "dynamic"}}, "got 'dynamic'"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling: missing field 'factor'"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2, "mscale": 3}},
            "rope_scaling.mscale = 3 is not supported with rope_type 'linear'",
        ),
        (
            {"rope_parameters": {"partial_rotary_factor": 0.5}},
            "rope_parameters.partial_rotary_factor = 0.5 is not supported",
        ),
        ({"rope_scaling": [1]}, r"rope_scaling must be an object, got \[1\]"),
        (
            {"rope_scaling": {**LLAMA3, "low_freq_factor": 4.0}},
            "rope.low_freq_factor must be below rope.high_freq_factor, got 4.0 and 4.0",
        ),
        ({"rope_theta": -1}, "rope_theta must be a positive number, got -1"),
    ],
)
def test_rope(given, expected):
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            hf_config.decoder_config({**BASE, **given})
    else:
        assert hf_config.decoder_config({**BASE, **given}).block.rope == expected


@pytest.mark.parametrize(
    ("model_type", "given", "expected"),
    [
        ("qwen2", {}, (False, True, False, False)),
        ("qwen3", {}, (True, False, False, False)),
        ("qwen3", {"attention_bias": True}, (True, True, True, False)),
        ("llama", {}, (False, False, False, False)),
        ("llama", {"attention_bias": True}, (False, True, True, False)),
        ("llama", {"mlp_bias": True}, (False, False, False, True)),
    ],
)
def test_norms_and_biases_of_the_families(model_type, given, expected):
    block = hf_config.block_config({**BASE, "model_type": model_type, **given})
    found = (block.qk_norm, block.attention_bias, block.output_bias, block.mlp_bias)
    assert found == expected


@pytest.mark.parametrize(
    ("values", "generation", "expected"),
    [
        ({"eos_token_id": 3}, None, (3,)),
        ({"eos_token_id": [3, 5, 3]}, None, (3, 5)),
        ({"eos_token_id": None}, None, ()),
        ({"eos_token_id": 3}, {"eos_token_id": [7, 3]}, (7, 3)),
        ({"eos_token_id": 3}, {"eos_token_id": None}, (3,)),
        ({"eos_token_id": "x"}, None, "eos_token_id must be an integer or a list"),
        ({"eos_token_id": 100}, None, "stop_tokens must lie in 0..99"),
    ],
)
def test_stop_tokens(values, generation, expected):
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            hf_config.decoder_config({**BASE, **values}, generation=generation)
    else:
        config = hf_config.decoder_config({**BASE, **values}, generation=generation)
        assert config.stop_tokens == expected


def test_unused_fields_and_neutral_values_are_accepted():
    neutral = {
        "sliding_window": 4096,
        "use_sliding_window": False,
        "max_window_layers": 28,
        "layer_types": ["full_attention"] * 2,
        "pretraining_tp": 1,
        "partial_rotary_factor": 1.0,
        "attn_logit_softcapping": None,
        "embedding_multiplier": 1.0,
        "quantization_config": None,
        "num_experts": 0,
        "attention_dropout": 0.0,
        "use_cache": True,
    }
    assert hf_config.decoder_config({**BASE, **neutral}) == hf_config.decoder_config(
        BASE
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({**BASE, "model_type": "mamba"}, "model_type must be one of .* got 'mamba'"),
        (without("model_type"), "model_type must be one of .* got None"),
        (without("vocab_size"), "here: missing field 'vocab_size'"),
        (without("hidden_act"), "here: missing field 'hidden_act'"),
        ({**BASE, "vocab_size": 0}, "vocab_size must be a positive integer, got 0"),
        ({**BASE, "vocab_size": 1.5}, "vocab_size must be a positive integer, got 1.5"),
        ({**BASE, "vocab_size": True}, "vocab_size must be a positive integer, got Tr"),
        (
            {**BASE, "rms_norm_eps": float("nan")},
            "rms_norm_eps must be a positive numb",
        ),
        (
            {**BASE, "tie_word_embeddings": 1},
            "tie_word_embeddings must be true or fals",
        ),
        ({**BASE, "num_key_value_heads": 3}, "here: num_heads must be a multiple of"),
        (
            {**without("head_dim"), "hidden_size": 33},
            "hidden_size must be a multiple of num_attention_heads when head_dim is",
        ),
        ({**BASE, "hidden_act": "gelu"}, "here: hidden_act = 'gelu' is not supported"),
        ({**BASE, "dtype": "int8"}, "here: dtype must be one of .* got 'int8'"),
        ({**BASE, "torch_dtype": "float64"}, "dtype must be one of .* got 'float64'"),
        (
            {**BASE, "sliding_window": 64, "use_sliding_window": True},
            "sliding_window = 64 is in use and not supported",
        ),
        (
            {**BASE, "model_type": "llama", "sliding_window": 64},
            "sliding_window = 64 is in use and not supported",
        ),
        (
            {**BASE, "layer_types": ["full_attention", "sliding_attention"]},
            "layer_types must be 'full_attention', got 'sliding_attention'",
        ),
        ({**BASE, "layer_types": 2}, "here: layer_types must be a list, got 2"),
        ({**BASE, "layer_types": "full_attention"}, "must be a list, got 'full_att"),
        ({**BASE, "layer_types": [[]]}, r"must be 'full_attention', got \[\]"),
        (
            {**BASE, "model_type": ["qwen3"]},
            r"model_type must be one of .* \['qwen3'\]",
        ),
        ({**BASE, "dtype": 0}, "here: dtype must be one of .* got 0"),
        ({**BASE, "dtype": ["float32"]}, r"dtype must be one of .* got \['float32'\]"),
        ({**BASE, "hidden_act": ["silu"]}, "hidden_act = .'silu'. is not supported"),
        (
            {**without("rope_parameters"), "rope_scaling": "linear"},
            "here: rope_scaling must be an object, got 'linear'",
        ),
        ({**BASE, "rope_parameters": []}, r"rope_parameters must be an object, got \["),
        (
            {**BASE, "rope_parameters": {"rope_type": ["linear"]}},
            r"here: rope_type must be one of .* got \['linear'\]",
        ),
        (
            {**BASE, "rope_parameters": {"rope_type": None}},
            "here: rope_type must be one of .* got None",
        ),
        (
            {**without("rope_theta"), "rope_parameters": {"rope_theta": "1e4"}},
            "here: rope_theta must be a positive number, got '1e4'",
        ),
        (
            {**BASE, "model_type": "qwen2", "attention_bias": False},
            "attention_bias must be true for qwen2, got False",
        ),
        *(
            ({**BASE, name: value}, f"here: {name} = .* is not supported")
            for name, value in {
                "partial_rotary_factor": 0.5,
                "pretraining_tp": 2,
                "attn_logit_softcapping": 50.0,
                "final_logit_softcapping": 30.0,
                "logit_scale": 0.25,
                "logits_scaling": 8.0,
                "embedding_multiplier": 12.0,
                "residual_multiplier": 0.2,
                "attention_multiplier": 0.01,
                "scale_emb": 12,
                "num_experts": 128,
                "num_local_experts": 8,
                "moe_intermediate_size": 768,
                "quantization_config": {"bits": 4},
                "attention_chunk_size": 8192,
                "no_rope_layers": [1, 0],
            }.items()
        ),
    ],
)
def test_what_changes_the_maths_is_refused_by_name(values, message):
    with pytest.raises(ValueError, match=message):
        hf_config.decoder_config(values, where="here")
