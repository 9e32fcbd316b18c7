"""DeepSpec's config.json: both places of settings, older keys, every refusal."""

import dataclasses
import shutil

import pytest

from dspark_jax import tensor_files
from dspark_jax.interop import deepspec, deepspec_config


@pytest.fixture
def vanilla(golden, tmp_path):
    """A copy of one drafter, to damage."""
    drafter = golden / "cases" / "dspark_vanilla_b4" / "drafter"
    shutil.copytree(drafter, tmp_path / "drafter")
    return tmp_path / "drafter"


def edit(folder, changes):
    """Writes changed keys of config.json; None takes a key away."""
    values = tensor_files.read_json(folder / "config.json") | changes
    values = {key: value for key, value in values.items() if value is not None}
    tensor_files.write_json(folder / "config.json", values)


def test_older_keys_stay_and_say_the_same(vanilla, tmp_path):
    rope = tensor_files.read_json(vanilla / "config.json")["rope_parameters"]
    edit(
        vanilla,
        {
            "rope_parameters": None,
            "rope_theta": rope["rope_theta"],
            "rope_scaling": {"rope_type": "linear", "factor": 2.0},
            "dtype": None,
            "torch_dtype": "float32",
            "unknown": {"kept": [1, 2]},
        },
    )
    config, params, extra = deepspec.load(vanilla)
    assert (config.block.rope.kind, config.block.rope.factor) == ("linear", 2.0)
    deepspec.save(tmp_path, config, params, extra_config=extra)
    values = tensor_files.read_json(tmp_path / "config.json")
    assert values["rope_theta"] == values["rope_parameters"]["rope_theta"] == 1e6
    assert values["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}
    assert values["torch_dtype"] == values["dtype"] == "float32"
    assert values["unknown"] == {"kept": [1, 2]}
    assert deepspec.load(tmp_path)[0] == config


@pytest.mark.parametrize("place", ["dflash_config", "dspark_config"])
def test_nested_settings_are_read_and_written_at_top_level(vanilla, tmp_path, place):
    expected, params, _ = deepspec.load(vanilla)
    values = tensor_files.read_json(vanilla / "config.json")
    moved = {key: values[key] for key in deepspec_config._SETTINGS}
    nested = {**moved, "projector_type": "dspark", "attention_mode": "gqa", "x": 1}
    edit(vanilla, {**dict.fromkeys(moved), place: nested})
    config, _, extra = deepspec.load(vanilla)
    assert config == expected
    deepspec.save(tmp_path, config, params, extra_config=extra)
    written = tensor_files.read_json(tmp_path / "config.json")
    assert {key: written[key] for key in moved} == moved
    assert written[place] == {
        "projector_type": "dspark",
        "attention_mode": "gqa",
        "x": 1,
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mask_token_id": None}, "missing field 'mask_token_id' .it has no default."),
        ({"mask_token_id": -1}, "mask_token_id must be an integer from 0, got -1"),
        ({"mask_token_id": True}, "mask_token_id must be an integer from 0, got True"),
        (
            {"mask_token_id": 128},
            "mask_token must lie in 0..127 .the vocabulary., got 1",
        ),
        ({"block_size": None}, "missing field 'block_size'"),
        ({"block_size": 0}, "block_size must be a positive integer, got 0"),
        ({"num_target_layers": None}, "missing field 'num_target_layers'"),
        (
            {"target_layer_ids": None},
            "target_layer_ids must be a list of integers, got N",
        ),
        ({"target_layer_ids": []}, "tap_layers must name at least one"),
        ({"target_layer_ids": [1, 0]}, "tap_layers must be strictly increasing"),
        ({"target_layer_ids": [0, 4]}, "tap_layers must lie in -1..3"),
        ({"target_layer_ids": [0, 1]}, r"'fc.weight' must have shape \(32, 64\), got"),
        ({"markov_rank": -1}, "markov_rank must be an integer from 0, got -1"),
        ({"markov_rank": 0}, "confidence_kind 'markov' needs a Markov head"),
        ({"markov_rank": 4}, r"markov_w1.weight' must have shape \(128, 4\), got"),
        ({"markov_head_type": "lstm"}, "markov_head_type must be one of .* got 'lstm'"),
        ({"markov_head_type": "gated"}, "missing 'markov_head.gate_proj.weight'"),
        ({"enable_confidence_head": False}, "unexpected 'confidence_head.proj.bias'"),
        ({"enable_confidence_head": 1}, "enable_confidence_head must be true or false"),
        (
            {"confidence_head_with_markov": False},
            r"'confidence_head.proj.weight' must have shape \(1, 32\), got \(1, 40\)",
        ),
        ({"num_hidden_layers": 3}, "missing 'layers.2.input_layernorm.weight'"),
        ({"num_hidden_layers": 1}, "unexpected 'layers.1.input_layernorm.weight'"),
        ({"num_hidden_layers": 10**12}, "1000000000000 layers do not fit 31 tensors"),
        (
            {"dtype": "float16"},
            "dtype must be one of .'float32', 'bfloat16'., got 'floa",
        ),
        ({"dtype": "bfloat16"}, "must have the config's dtype bfloat16, got float32"),
        (
            {"architectures": ["DFlashDraftModel"]},
            "architectures must be one of .* got ",
        ),
        ({"model_type": "gemma4"}, "model_type = 'gemma4' is not supported"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings = True is not supported"),
        ({"sample_from_anchor": False}, "sample_from_anchor = False is not supported"),
        ({"draft_vocab_size": 64}, "draft_vocab_size = 64 is not supported"),
        ({"rope_is_neox_style": False}, "rope_is_neox_style = False is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
        (
            {"sliding_window": 64, "use_sliding_window": True},
            "sliding_window = 64 is in use and not supported",
        ),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            "layer_types must be 'full_attention', got 'sliding_attention'",
        ),
        (
            {"dflash_config": {"projector_type": "domino"}},
            "projector_type = 'domino' is not supported",
        ),
        (
            {"dspark_config": {"attention_mode": "mla"}},
            "attention_mode = 'mla' is not supported",
        ),
        (
            {"dflash_config": {"sliding_window": 64}},
            "dflash_config: sliding_window = 64 is in use",
        ),
        (
            {"dflash_config": {"mask_token_id": 5}},
            r"mask_token_id must be the same at top level and nested, got \[127, 5\]",
        ),
        ({"dflash_config": [1]}, r"dflash_config must be an object, got \[1\]"),
        ({"target_fingerprint": 5}, "target_fingerprint must be text, got 5"),
    ],
)
def test_bad_settings_are_refused_by_name(vanilla, changes, message):
    edit(vanilla, changes)
    with pytest.raises(ValueError, match=message):
        deepspec.load(vanilla)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"param_dtype": "float16"}, "needs param_dtype to be one of .* got 'float16'"),
        ({"qk_norm": False}, "needs block.qk_norm to be one of .True,., got False"),
        ({"mlp_bias": True}, "needs block.mlp_bias to be one of .False,., got True"),
        ({"output_bias": True}, "needs block.output_bias to be one of .False,., got T"),
    ],
)
def test_what_the_layout_cannot_express_is_not_written(
    vanilla, tmp_path, changes, message
):
    config, params, _ = deepspec.load(vanilla)
    if "param_dtype" in changes:
        config = dataclasses.replace(config, **changes)
    else:
        block = dataclasses.replace(config.block, **changes)
        config = dataclasses.replace(config, block=block)
    with pytest.raises(ValueError, match=message):
        deepspec.save(tmp_path / "new", config, params)
    assert not (tmp_path / "new").exists()
