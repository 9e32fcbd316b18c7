"""A GGUF file of architecture "llama" as a `DecoderConfig` and named tensors.

The names become Hugging Face's, and the query and key rows return from llama.cpp's
order to the one that `layers.rope` rotates.
"""

import numpy as np

from dspark_jax import tensor_files
from dspark_jax.config import BlockConfig, DecoderConfig, RopeConfig
from dspark_jax.targets import gguf
from dspark_jax.targets.gguf import GgufFile

# Control tokens that end a turn, besides the file's eos_token_id (as llama.cpp does).
END_OF_TURN = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>")
CONTROL = 3  # token type

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def decoder_config(file: GgufFile) -> DecoderConfig:
    """The configuration of a llama model, float32.

    Raises:
      ValueError: another architecture, or a field that is missing or not supported.
    """
    architecture = file.metadata.get("general.architecture")
    if architecture != "llama":
        raise ValueError(
            f"{file.path}: general.architecture must be 'llama', got {architecture!r}"
        )
    for key, neutral in (
        ("llama.expert_count", 0),
        ("llama.attention.sliding_window", 0),
        ("llama.attention.clamp_kqv", 0.0),
        ("llama.attention.scale", 0.0),
        ("llama.logit_scale", 1.0),
        ("llama.embedding_scale", 1.0),
        ("llama.residual_scale", 1.0),
        ("llama.attn_logit_softcapping", 0.0),
        ("llama.final_logit_softcapping", 0.0),
    ):
        if file.metadata.get(key, neutral) != neutral:
            raise ValueError(
                f"{file.path}: {key} = {file.metadata[key]!r} is not supported"
            )
    width = _integer(file, "embedding_length")
    num_heads = _integer(file, "attention.head_count")
    head_width = _integer(file, "attention.key_length", width // max(num_heads, 1))
    for key in ("attention.value_length", "rope.dimension_count"):
        if _integer(file, key, head_width) != head_width:
            raise ValueError(
                f"{file.path}: llama.{key} must be the head width {head_width}, got "
                f"{_integer(file, key)}"
            )
    vocab_size = len(tokens(file))
    if _integer(file, "vocab_size", vocab_size) != vocab_size:
        raise ValueError(
            f"{file.path}: llama.vocab_size must be the number of tokens {vocab_size}, "
            f"got {_integer(file, 'vocab_size')}"
        )
    return DecoderConfig(
        vocab_size=vocab_size,
        num_layers=_integer(file, "block_count"),
        block=BlockConfig(
            width=width,
            num_heads=num_heads,
            num_kv_heads=_integer(file, "attention.head_count_kv", num_heads),
            head_width=head_width,
            ffn_width=_integer(file, "feed_forward_length"),
            rms_eps=_number(file, "attention.layer_norm_rms_epsilon"),
            rope=_rope(file),
        ),
        max_position=_integer(file, "context_length"),
        tied_embeddings="output.weight" not in file.tensors,
        stop_tokens=stop_tokens(file),
    )


def hf_tensors(file: GgufFile, config: DecoderConfig) -> dict[str, np.ndarray]:
    """All tensors under their Hugging Face names, float32, query and key rows in order.

    Raises:
      ValueError: a tensor that the configuration does not have.
    """
    tensor_files.check_num_layers(config.num_layers, file.tensors, file.path)
    names = {"token_embd.weight": "model.embed_tokens.weight"}
    names["output_norm.weight"] = "model.norm.weight"
    if not config.tied_embeddings:
        names["output.weight"] = "lm_head.weight"
    for layer in range(config.num_layers):
        for ours, theirs in _LAYER_NAMES.items():
            names[f"blk.{layer}.{ours}.weight"] = (
                f"model.layers.{layer}.{theirs}.weight"
            )
    for name in file.tensors:
        if name not in names:
            raise ValueError(f"{file.path}: tensor {name!r} is not supported")
    heads = {"q_proj": config.block.num_heads, "k_proj": config.block.num_kv_heads}
    tensors = {}
    for ours, theirs in names.items():
        values = gguf.tensor(file, ours)
        count = heads.get(theirs.split(".")[-2])
        tensors[theirs] = (
            values if count is None else _unpermute(file, ours, values, count)
        )
    return tensors


def stop_tokens(file: GgufFile) -> tuple[int, ...]:
    """The file's eos id, then the control tokens that end a turn.

    Raises:
      ValueError: the tokens, their types or the id are missing or of another type.
    """
    words = tokens(file)
    found = []
    eos = file.metadata.get("tokenizer.ggml.eos_token_id")
    if eos is not None:
        if type(eos) is not int or not 0 <= eos < len(words):
            raise ValueError(
                f"{file.path}: tokenizer.ggml.eos_token_id must be an integer in "
                f"0..{len(words) - 1}, got {eos!r}"
            )
        found.append(eos)
    if "tokenizer.ggml.token_type" not in file.metadata:
        return tuple(found)
    for index, (token, kind) in enumerate(zip(words, token_types(file), strict=True)):
        if kind == CONTROL and token in END_OF_TURN:
            found.append(index)
    return tuple(dict.fromkeys(found))


def tokens(file: GgufFile) -> list[str]:
    """The text of every token."""
    found = file.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(found, list) or not found:
        raise ValueError(f"{file.path}: missing metadata 'tokenizer.ggml.tokens'")
    if type(found[0]) is not str:  # GGUF's arrays hold one type.
        raise ValueError(
            f"{file.path}: tokenizer.ggml.tokens must hold texts, got {found[0]!r}"
        )
    return found


def token_types(file: GgufFile) -> list[int]:
    """The type of every token (see CONTROL)."""
    found = file.metadata.get("tokenizer.ggml.token_type")
    count = len(tokens(file))
    rule = f"tokenizer.ggml.token_type must hold {count} integers, one a token"
    if not isinstance(found, list):
        raise ValueError(f"{file.path}: {rule}, got {found!r}")
    if len(found) != count:
        raise ValueError(f"{file.path}: {rule}, got {len(found)}")
    if type(found[0]) is not int:
        raise ValueError(f"{file.path}: {rule}, got {found[0]!r}")
    return found


def _unpermute(file: GgufFile, name: str, values: np.ndarray, heads: int) -> np.ndarray:
    """Undoes llama.cpp's order of query and key rows (pairs (2i, 2i + 1) of a head)."""
    if values.ndim != 2 or values.shape[0] % (2 * heads):
        raise ValueError(
            f"{file.path}: {name!r} must have rows for {heads} heads, got shape "
            f"{values.shape}"
        )
    rows, width = values.shape
    split = values.reshape(heads, rows // heads // 2, 2, width)
    ordered = gguf.empty((heads, 2, rows // heads // 2, width))
    ordered[:] = split.swapaxes(1, 2)
    return ordered.reshape(rows, width)


def _rope(file: GgufFile) -> RopeConfig:
    theta = _number(file, "rope.freq_base", 10000.0)
    kind = file.metadata.get("llama.rope.scaling.type", "none")
    if kind == "none":
        return RopeConfig(theta=theta)
    if kind == "linear":
        factor = _number(file, "rope.scaling.factor")
        return RopeConfig(theta=theta, kind="linear", factor=factor)
    raise ValueError(
        f"{file.path}: llama.rope.scaling.type must be 'none' or 'linear', got {kind!r}"
    )


def _integer(file: GgufFile, name: str, default: int | None = None) -> int:
    value = file.metadata.get(f"llama.{name}", default)
    if type(value) is not int or value < 1:
        raise ValueError(
            f"{file.path}: llama.{name} must be a positive integer, got {value!r}"
        )
    return value


def _number(file: GgufFile, name: str, default: float | None = None) -> float:
    value = file.metadata.get(f"llama.{name}", default)
    if type(value) is not float or not 0 < value < float("inf"):
        raise ValueError(
            f"{file.path}: llama.{name} must be a positive number, got {value!r}"
        )
    # Stored as float32: the shortest decimal is what was meant (1e-05, not 9.99e-06).
    return float(str(np.float32(value)))
