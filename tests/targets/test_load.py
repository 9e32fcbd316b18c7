"""Targets from folders and the default model: parity with Hugging Face, refusals."""

import json
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from dspark_jax import tensor_files
from dspark_jax.targets import decoder, fetch, load
from dspark_jax.targets.tokenizer import load_tokenizer

pytestmark = pytest.mark.usefixtures("quick_compilation")

LLAMA = ("llama_plain", "llama_llama3", "llama_linear_biases", "qwen2_plain")


def run(target, params, tokens, positions=None, tap_layers=()):
    batch, length = tokens.shape
    if positions is None:
        positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), tokens.shape)
    cache = target.init_cache(batch, length)
    hidden, taps, _ = jax.jit(target.forward, static_argnames="tap_layers")(
        params, jnp.asarray(tokens), positions, cache, tap_layers=tap_layers
    )
    return hidden, taps, target.unembed(params, hidden)


def copy_of(folder, destination):
    for name in ("config.json", "model.safetensors"):
        shutil.copy(folder / name, destination / name)
    return destination


@pytest.mark.parametrize(
    ("name", "case", "taps"),
    [
        ("qwen3_untied", "dspark_vanilla_b7", (0, 1, 2)),
        ("qwen3_tied", "dspark_vanilla_b7_tied", (-1, 1, 2)),
    ],
)
def test_golden_targets_give_the_reference_states_and_logits(golden, name, case, taps):
    target, params = load.load_target(golden / "targets" / name)
    expected = tensor_files.read(golden / "cases" / case / "train.safetensors")
    mask = expected["in.attention_mask"].astype(bool)
    positions = np.where(mask, np.cumsum(mask, axis=1, dtype=np.int32) - 1, -1)
    hidden, tapped, logits = run(
        target, params, expected["in.input_ids"], jnp.asarray(positions), taps
    )
    for found, key in (
        (hidden, "in.target_last_hidden_states"),
        (tapped, "in.target_hidden_states"),
        (logits, "out.target_logits"),
    ):
        assert found.dtype == jnp.float32
        np.testing.assert_allclose(found[mask], expected[key][mask], atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("name", "case", "taps"),
    [
        ("qwen3_untied", "dspark_vanilla_b7", (0, 1, 2)),
        ("qwen3_tied", "dspark_vanilla_b7_tied", (-1, 1, 2)),
    ],
)
def test_golden_targets_give_the_reference_prefill(golden, name, case, taps):
    target, params = load.load_target(golden / "targets" / name)
    expected = tensor_files.read(golden / "cases" / case / "decode.safetensors")
    traces = json.loads((golden / "cases" / case / "decode.json").read_text())["traces"]
    for index, trace in enumerate(traces):
        tokens = np.asarray([trace["prompt"]], np.int32)
        _, tapped, logits = run(target, params, tokens, tap_layers=taps)
        for found, key in ((logits, "prefill_logits"), (tapped, "prefill_context")):
            want = expected[f"t{index}.{key}"]
            np.testing.assert_allclose(found[0], want, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["qwen3_untied", "qwen3_tied"])
def test_the_configuration_alone_has_the_same_fingerprint(golden, name):
    target, _ = load.load_target(golden / "targets" / name)
    found = load.load_config(golden / "targets" / name)
    assert found.fingerprint == target.config.fingerprint
    assert found.vocab_size == target.config.vocab_size


def test_a_folder_without_a_configuration_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        load.load_config(tmp_path)


@pytest.mark.parametrize("name", LLAMA)
def test_logits_equal_those_of_transformers(golden, name):
    folder = golden / "llama" / name
    expected = tensor_files.read(folder / "expected.safetensors")
    target, params = load.load_target(folder)
    hidden, first, logits = run(target, params, expected["tokens"], tap_layers=(0,))
    for found, key in ((hidden, "final"), (first, "layer_0"), (logits, "logits")):
        np.testing.assert_allclose(found, expected[key], atol=1e-4, rtol=0)
    assert target.config.stop_tokens == (2, 3)


def test_loading_twice_gives_equal_targets(golden):
    folder = golden / "targets" / "qwen3_tied"
    first, params = load.load_target(folder)
    second, _ = load.load_target(str(folder))
    assert first == second
    assert hash(first) == hash(second)
    abstract = decoder.abstract(first.config)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), params) == jax.tree.map(
        lambda x: (x.shape, x.dtype), abstract
    )


@pytest.mark.parametrize(
    ("param_dtype", "compute_dtype", "expected"),
    [
        ("float32", None, ("float32", "float32")),
        ("bfloat16", None, ("bfloat16", "bfloat16")),
        ("bfloat16", "float32", ("bfloat16", "float32")),
        (None, None, ("float32", "float32")),
    ],
)
def test_dtypes(golden, param_dtype, compute_dtype, expected):
    target, params = load.load_target(
        golden / "targets" / "qwen3_untied",
        param_dtype=param_dtype,
        compute_dtype=compute_dtype,
    )
    config = target.config
    assert (config.param_dtype, config.compute_dtype) == expected
    assert {str(x.dtype) for x in jax.tree.leaves(params)} == {expected[0]}


def test_the_fingerprint_names_the_model_not_the_file(golden, tmp_path):
    folder = golden / "targets" / "qwen3_untied"
    print_of = lambda path: load.load_target(path)[0].config.fingerprint  # noqa: E731
    original = print_of(folder)
    assert original == "f4556513015b4e77"
    copy_of(folder, tmp_path)
    tensors = tensor_files.read(folder / "model.safetensors")
    narrow = {k: v.astype(ml_dtypes.bfloat16) for k, v in tensors.items()}
    tensor_files.write(tmp_path / "model.safetensors", narrow)
    assert print_of(tmp_path) == original
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * np.float32(1.02)
    tensor_files.write(tmp_path / "model.safetensors", tensors)
    assert print_of(tmp_path) != original
    assert print_of(golden / "targets" / "qwen3_tied") != original


def test_shards_load_as_one_file_does(golden, tmp_path):
    folder = golden / "targets" / "qwen3_untied"
    tensors = tensor_files.read(folder / "model.safetensors")
    shutil.copy(folder / "config.json", tmp_path)
    names = sorted(tensors)
    weight_map = {}
    for shard, part in (("a.safetensors", names[::2]), ("b.safetensors", names[1::2])):
        tensor_files.write(tmp_path / shard, {name: tensors[name] for name in part})
        weight_map |= dict.fromkeys(part, shard)
    index = {"weight_map": weight_map}
    tensor_files.write_json(tmp_path / tensor_files.INDEX_FILE, index)
    _, expected = load.load_target(folder)
    _, found = load.load_target(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_extra_tensors_that_old_checkpoints_carry(golden, tmp_path):
    folder = copy_of(golden / "targets" / "qwen3_tied", tmp_path)
    tensors = tensor_files.read(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    tensor_files.write(folder / "model.safetensors", tensors)
    _, params = load.load_target(folder)
    assert params.head is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.pop("model.layers.1.mlp.up_proj.weight"),
            "missing 'model.layers.1.mlp.up_proj.weight'",
        ),
        (
            lambda t: t.update({"model.layers.9.mlp.bias": np.ones(1, np.float32)}),
            "unexpected 'model.layers.9.mlp.bias'",
        ),
        (
            lambda t: t.update({"model.norm.weight": np.ones(31, np.float32)}),
            r"'model.norm.weight' must have shape \(32,\), got \(31,\)",
        ),
        (
            lambda t: t.update({"model.norm.weight": np.ones(32, np.int32)}),
            "'model.norm.weight' must be float32, bfloat16 or float16, got int32",
        ),
        (
            lambda t: t.update({"lm_head.weight": np.ones((128, 32), np.float32)}),
            "lm_head.weight must equal model.embed_tokens.weight when tie_word_embeddi",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(golden, tmp_path, change, message):
    folder = copy_of(golden / "targets" / "qwen3_tied", tmp_path)
    tensors = tensor_files.read(folder / "model.safetensors")
    change(tensors)
    tensor_files.write(folder / "model.safetensors", tensors)
    with pytest.raises(ValueError, match=message):
        load.load_target(folder)


def test_a_folder_without_config_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        load.load_target(tmp_path)


def test_more_layers_than_tensors_are_refused_at_once(golden, tmp_path):
    folder = copy_of(golden / "targets" / "qwen3_tied", tmp_path)
    values = tensor_files.read_json(folder / "config.json")
    tensor_files.write_json(
        folder / "config.json", {**values, "num_hidden_layers": 10**15}
    )
    with pytest.raises(ValueError, match="1000000000000000 layers do not fit 46 tenso"):
        load.load_target(folder)


def test_bad_dtypes_are_refused(golden):
    folder = golden / "targets" / "qwen3_tied"
    with pytest.raises(ValueError, match=r"param_dtype must be one of .* got 'int8'"):
        load.load_target(folder, param_dtype="int8")
    with pytest.raises(ValueError, match=r"compute_dtype must be one of .* got 'fp8'"):
        load.load_target(folder, compute_dtype="fp8")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("question", "answer"),
    [
        (
            "What is the capital of France, and what is it known for?",
            "The capital of France is Paris. It is a city renowned for its historical",
        ),
        (
            "Write a Python function that returns the n-th Fibonacci number.",
            "```python\ndef fibonacci(n):",
        ),
    ],
)
def test_the_default_target_writes_the_known_answers(question, answer):
    if not (fetch.cache_dir() / fetch.FILE_NAME).is_file():
        pytest.skip("the default target is not in the cache")
    target, params = load.load_target("smollm2-135m")
    assert target.config.fingerprint == "da5c73181d6926b1"
    tokenizer = load_tokenizer("smollm2-135m")
    ids = tokenizer.encode_chat([{"role": "user", "content": question}])
    forward = jax.jit(target.forward)
    cache = target.init_cache(1, 128)
    rows, position, written = ids, 0, []
    while len(written) < 20:
        tokens = jnp.asarray([rows], jnp.int32)
        positions = position + jnp.arange(len(rows), dtype=jnp.int32)[None]
        hidden, _, cache = forward(params, tokens, positions, cache)
        position += len(rows)
        rows = [int(jnp.argmax(target.unembed(params, hidden[0, -1])))]
        written += rows
    assert tokenizer.decode(written).startswith(answer)
