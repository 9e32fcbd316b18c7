"""Whole models and tokenizers from GGUF files, and those that are not supported."""

import contextlib
import math

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from dspark_jax.targets import fetch, gguf, gguf_llama, load
from dspark_jax.targets.tokenizer import load_tokenizer

pytestmark = pytest.mark.usefixtures("quick_compilation")

F16 = 1
WIDTH, HEADS, KV_HEADS, NUM_TOKENS = 32, 4, 2, 6


def test_a_whole_model_loads_with_its_rows_in_order(path, gguf_writer):
    items = gguf_writer.tensors()
    meant = {name: gguf_writer.quantise(*item)[1] for name, item in items.items()}
    gguf_writer.build(path, items=items)
    target, params = load.load_target(path)
    config = target.config
    assert config.block.rms_eps == 1e-5  # stored as a float32
    assert config.tied_embeddings
    assert config.stop_tokens == (0, 4)
    np.testing.assert_array_equal(params.embed, meant["token_embd.weight"])
    np.testing.assert_array_equal(params.layers[1].down, meant["blk.1.ffn_down.weight"])
    tensors = load.block_tensors(config.block, params.layers[0], "")
    for name, stored, heads in (("q", "attn_q", HEADS), ("k", "attn_k", KV_HEADS)):
        rows = tensors[f"self_attn.{name}_proj.weight"]
        np.testing.assert_array_equal(
            gguf_writer.permute(rows, heads), meant[f"blk.0.{stored}.weight"]
        )
    for name, stored in (
        ("self_attn.v_proj", "attn_v"),
        ("mlp.gate_proj", "ffn_gate"),
        ("mlp.up_proj", "ffn_up"),
    ):
        np.testing.assert_array_equal(
            tensors[f"{name}.weight"], meant[f"blk.0.{stored}.weight"]
        )
    tokens = jnp.asarray([[1, 2, 3]], jnp.int32)
    positions = jnp.arange(3, dtype=jnp.int32)[None]
    hidden, _, _ = target.forward(params, tokens, positions, target.init_cache(1, 3))
    assert jnp.isfinite(target.unembed(params, hidden)).all()


def test_an_untied_head_and_linear_rope(path, gguf_writer):
    items = gguf_writer.tensors()
    items["output.weight"] = (np.ones((NUM_TOKENS, WIDTH), np.float32), F16)
    scaling = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    gguf_writer.build(path, {**gguf_writer.metadata(), **scaling}, items)
    target, params = load.load_target(path, param_dtype="bfloat16")
    assert not target.config.tied_embeddings
    assert (target.config.block.rope.kind, target.config.block.rope.factor) == (
        "linear",
        4.0,
    )
    assert {str(x.dtype) for x in jax.tree.leaves(params)} == {"bfloat16"}


def test_its_tokenizer(path, gguf_writer):
    gguf_writer.build(path)
    loaded = load_tokenizer(path)
    assert loaded.encode("abcab<|im_end|>") == [3, 5, 3, 0]
    assert loaded.stop_tokens == (0, 4)
    assert loaded.chat is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"general.architecture": "qwen2"},
            "architecture must be 'llama', got 'qwen2'",
        ),
        ({"general.architecture": 3}, "architecture must be 'llama', got 3"),
        ({"llama.expert_count": 8}, "llama.expert_count = 8 is not supported"),
        (
            {"llama.attention.sliding_window": 64},
            "sliding_window = 64 is not supported",
        ),
        ({"llama.logit_scale": 2.0}, "llama.logit_scale = 2.0 is not supported"),
        (
            {"llama.block_count": None},
            "llama.block_count must be a positive integer, go",
        ),
        (
            {"llama.block_count": 0},
            "llama.block_count must be a positive integer, got 0",
        ),
        ({"llama.block_count": "x"}, "block_count must be a positive integer, got 'x'"),
        ({"llama.block_count": 2**31}, "2147483648 layers do not fit 20 tensors"),
        ({"llama.block_count": 3}, "missing tensor 'blk.2.attn_norm.weight'"),
        ({"llama.block_count": 1}, "tensor 'blk.1.attn_norm.weight' is not supported"),
        (
            {"llama.attention.head_count": [4, 4]},
            r"head_count must be a positive integer, got \[4, 4\]",
        ),
        ({"llama.attention.head_count_kv": 3}, "num_heads must be a multiple of"),
        ({"llama.rope.dimension_count": 4}, "must be the head width 8, got 4"),
        ({"llama.vocab_size": 9}, "vocab_size must be the number of tokens 6, got 9"),
        ({"llama.rope.scaling.type": "yarn"}, "must be 'none' or 'linear', got 'yarn'"),
        (
            {"llama.attention.layer_norm_rms_epsilon": float("nan")},
            "layer_norm_rms_epsilon must be a positive number, got nan",
        ),
        ({"llama.embedding_length": 64}, "llama.rope.dimension_count must be the head"),
        (
            {"llama.feed_forward_length": 32},
            r"must have shape \(32, 32\), got \(64, 32",
        ),
        ({"tokenizer.ggml.tokens": None}, "missing metadata 'tokenizer.ggml.tokens'"),
        ({"tokenizer.ggml.tokens": [1, 2]}, "ggml.tokens must hold texts, got 1"),
        (
            {"tokenizer.ggml.eos_token_id": 6},
            "model.gguf: tokenizer.ggml.eos_token_id must be an integer in 0..5, got 6",
        ),
        (
            {"tokenizer.ggml.eos_token_id": "</s>"},
            "eos_token_id must be an integer in 0..5, got '</s>'",
        ),
        ({"tokenizer.ggml.eos_token_id": [1]}, r"integer in 0..5, got \[1\]"),
        (
            {"tokenizer.ggml.token_type": ["a"] * 6},
            "model.gguf: tokenizer.ggml.token_type must hold 6 integers, one a token, "
            "got 'a'",
        ),
        ({"tokenizer.ggml.token_type": 3}, "token_type must hold 6 integers.* got 3"),
        ({"tokenizer.ggml.token_type": [3]}, "token_type must hold 6 integers.* got 1"),
        ({"general.alignment": 0}, r"alignment must be a power of two in 8..65536, g"),
        ({"general.alignment": 24}, "alignment must be a power of two in 8.* got 24"),
        ({"general.alignment": 4}, "alignment must be a power of two in 8.* got 4"),
        ({"general.alignment": 2**17}, "a power of two in 8.* got 131072"),
        ({"general.alignment": "32"}, "a power of two in 8..65536, got '32'"),
    ],
)
def test_models_that_are_not_supported_are_refused_by_name(
    path, gguf_writer, changes, message
):
    meta = {
        k: v for k, v in {**gguf_writer.metadata(), **changes}.items() if v is not None
    }
    gguf_writer.build(path, meta)
    with pytest.raises(ValueError, match=message):
        load.load_target(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"tokenizer.ggml.pre": "llama-bpe"},
            "must be 'gpt2' and 'smollm', got 'gpt2' a",
        ),
        ({"tokenizer.ggml.merges": ["a z"]}, "merges must be pairs of tokens .* 'a z'"),
        ({"tokenizer.ggml.merges": ["ab"]}, "merges must be pairs of tokens .* 'ab'"),
        (
            {"tokenizer.ggml.merges": None},
            "model.gguf: tokenizer.ggml.merges must be a list of texts, got None",
        ),
        ({"tokenizer.ggml.merges": [3]}, r"merges must be a list of texts, got \[3\]"),
        ({"tokenizer.ggml.merges": list(range(99))}, r"texts, got \[0, .*\.\.\."),
        ({"tokenizer.ggml.token_type": None}, "must hold 6 integers.* got None"),
        ({"tokenizer.ggml.token_type": [1]}, "must hold 6 integers.* got 1"),
        (
            {"tokenizer.ggml.tokens": ["a"] * 6},
            "tokenizer.ggml.tokens must be distinct",
        ),
        (
            {"tokenizer.ggml.tokens": [1]},
            "tokenizer.ggml.tokens must hold texts, got 1",
        ),
        (
            {"tokenizer.chat_template": 3},
            "model.gguf: tokenizer.chat_template must be text, got 3",
        ),
        (
            {"tokenizer.ggml.eos_token_id": "a"},
            "eos_token_id must be an integer in 0..5, got 'a'",
        ),
    ],
)
def test_tokenizers_that_are_not_supported_are_refused(
    path, gguf_writer, changes, message
):
    meta = {
        k: v for k, v in {**gguf_writer.metadata(), **changes}.items() if v is not None
    }
    gguf_writer.build(path, meta)
    with pytest.raises(ValueError, match=message):
        load_tokenizer(path)


@hypothesis.given(st.integers(0, 1 << 20), st.binary(min_size=1, max_size=9))
def test_random_damage_is_a_value_error(tmp_path_factory, gguf_writer, where, noise):
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    gguf_writer.build(path)
    content = bytearray(path.read_bytes())
    where %= len(content)
    content[where : where + len(noise)] = noise
    path.write_bytes(content)
    with contextlib.suppress(ValueError):
        file = gguf.read(path)
        gguf_llama.hf_tensors(file, gguf_llama.decoder_config(file))


def test_the_default_model_has_its_known_header():
    path = fetch.cache_dir() / fetch.FILE_NAME
    if not path.is_file():
        pytest.skip("the default target is not in the cache")
    file = gguf.read(path)
    config = gguf_llama.decoder_config(file)
    assert len(file.tensors) == 272
    assert sum(math.prod(t.shape) for t in file.tensors.values()) == 134_515_008
    assert (config.vocab_size, config.num_layers, config.max_position) == (
        49152,
        30,
        8192,
    )
    assert config.block.rms_eps == 1e-5
    assert config.stop_tokens == (2, 0)
