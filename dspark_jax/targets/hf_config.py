"""Hugging Face `config.json` of the Llama family to `DecoderConfig`, strictly.

A field that changes the maths and is not implemented is an error that names it: loaded
silently it would only show as a low acceptance. Both key styles are read:
`rope_parameters` and `dtype` (transformers 5), `rope_theta`, `rope_scaling` and
`torch_dtype` (before).
"""

import pathlib
from collections.abc import Mapping
from typing import Any

from dspark_jax import tensor_files
from dspark_jax.config import DTYPES, BlockConfig, DecoderConfig, RopeConfig

MODEL_TYPES = ("llama", "qwen2", "qwen3")
GENERATION_FILE = "generation_config.json"
# The values at which a field changes nothing; a field that is absent changes nothing.
_OFF: tuple[Any, ...] = (None, False, 0, [], {})
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "hidden_activation": ("silu", None),
    "pretraining_tp": (None, 1),
    "partial_rotary_factor": (None, 1),
    "rope_pct": (None, 1),
    "is_causal": (None, True),
    "scale_attn_by_inverse_layer_idx": _OFF,
    "no_rope_layers": _OFF,
    "use_bidirectional_attention": _OFF,
    "attention_chunk_size": _OFF,
    "alibi": _OFF,
    "parallel_attn": _OFF,
    "position_embedding_type": (None, "rope"),
    "quantization_config": _OFF,
    "compression_config": _OFF,
}
# Families of fields, by a part of their name.
_NEUTRAL_PARTS: dict[str, tuple[Any, ...]] = {
    "softcap": _OFF,
    "multiplier": (None, 1),
    "logit_scale": (None, 1),
    "logits_scal": (None, 1),
    "residual_scale": (None, 1),
    "scale_emb": (None, 1),
    "scale_depth": (None, 1),
    "expert": _OFF,
    "moe": _OFF,
}
_ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
}


def decoder_config(
    values: Mapping[str, Any],
    *,
    where: str = "config.json",
    generation: Mapping[str, Any] | None = None,
    param_dtype: str | None = None,
    compute_dtype: str | None = None,
) -> DecoderConfig:
    """The configuration of a target from its `config.json`.

    Args:
      values: the JSON object.
      where: the name of the file, for messages.
      generation: `generation_config.json`, whose end-of-sequence ids go first.
      param_dtype: None takes the file's.
      compute_dtype: None takes `param_dtype`.

    Raises:
      ValueError: a missing field, or one that is not supported at its value.
    """
    model_type = values.get("model_type")
    if model_type not in MODEL_TYPES:
        raise ValueError(
            f"{where}: model_type must be one of {MODEL_TYPES}, got {model_type!r}"
        )
    block = block_config(values, where=where)
    param_dtype = param_dtype or stored_dtype(values, where=where)
    try:
        return DecoderConfig(
            vocab_size=integer(values, "vocab_size", where=where),
            num_layers=integer(values, "num_hidden_layers", where=where),
            block=block,
            max_position=integer(values, "max_position_embeddings", where=where),
            tied_embeddings=flag(values, "tie_word_embeddings", False, where=where),
            stop_tokens=stop_tokens(values, generation, where=where),
            param_dtype=param_dtype,
            compute_dtype=compute_dtype or param_dtype,
        )
    except ValueError as error:
        raise ValueError(_prefixed(where, error)) from error


def block_config(
    values: Mapping[str, Any], *, where: str = "config.json"
) -> BlockConfig:
    """The transformer block of a `config.json` of one of `MODEL_TYPES`."""
    check_supported(values, where=where)
    model_type = values.get("model_type")
    width = integer(values, "hidden_size", where=where)
    num_heads = integer(values, "num_attention_heads", where=where)
    num_kv_heads = integer(values, "num_key_value_heads", num_heads, where=where)
    if values.get("head_dim") is None and width % num_heads:
        raise ValueError(
            f"{where}: hidden_size must be a multiple of num_attention_heads when "
            f"head_dim is absent, got {width} and {num_heads}"
        )
    # Qwen2 has biases on query, key and value and no field that says so.
    bias = flag(values, "attention_bias", model_type == "qwen2", where=where)
    if model_type == "qwen2" and not bias:
        raise ValueError(f"{where}: attention_bias must be true for qwen2, got False")
    try:
        return BlockConfig(
            width=width,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_width=integer(values, "head_dim", width // num_heads, where=where),
            ffn_width=integer(values, "intermediate_size", where=where),
            rms_eps=number(values, "rms_norm_eps", 1e-6, where=where),
            rope=rope_config(values, where=where),
            qk_norm=model_type == "qwen3",
            attention_bias=bias,
            output_bias=bias and model_type != "qwen2",
            mlp_bias=flag(values, "mlp_bias", False, where=where),
        )
    except ValueError as error:
        raise ValueError(_prefixed(where, error)) from error


def rope_config(values: Mapping[str, Any], *, where: str = "config.json") -> RopeConfig:
    """Rotary embedding from `rope_parameters`, or `rope_theta` and `rope_scaling`."""
    name: str = "rope_scaling"
    rope: Mapping[str, Any] = {}
    for candidate in ("rope_scaling", "rope_parameters"):
        found = values.get(candidate)
        if not isinstance(found, Mapping | None):
            raise ValueError(f"{where}: {candidate} must be an object, got {found!r}")
        if found:
            name, rope = candidate, found
    inner, outer = rope.get("rope_theta"), values.get("rope_theta")
    if inner is not None and outer is not None and inner != outer:
        raise ValueError(
            f"{where}: rope_theta must be the same in {name} and at top level, got "
            f"{inner} and {outer}"
        )
    kind = rope.get("rope_type", rope.get("type", "default"))
    if not isinstance(kind, str) or kind not in _ROPE_KEYS:
        raise ValueError(
            f"{where}: rope_type must be one of {tuple(_ROPE_KEYS)}, got {kind!r}"
        )
    known = {"rope_theta", "rope_type", "type", *_ROPE_KEYS[kind]}
    for key, value in rope.items():
        neutral = (None, 1) if key in ("partial_rotary_factor", "factor") else (None,)
        if key not in known and value not in neutral:
            raise ValueError(
                f"{where}: {name}.{key} = {value!r} is not supported with rope_type "
                f"{kind!r}"
            )
    nested = f"{where}: {name}"
    original = values.get("original_max_position_embeddings")
    theta = {"rope_theta": outer if inner is None else inner}
    settings: dict[str, Any] = {
        "kind": kind,
        "theta": number(theta, "rope_theta", 10000.0, where=where),
    }
    if kind != "default":
        settings["factor"] = number(rope, "factor", where=nested)
    if kind == "llama3":
        settings |= {
            "low_freq_factor": number(rope, "low_freq_factor", where=nested),
            "high_freq_factor": number(rope, "high_freq_factor", where=nested),
            "original_max_position": integer(
                rope, "original_max_position_embeddings", original, where=nested
            ),
        }
    return RopeConfig(**settings)


def stop_tokens(
    values: Mapping[str, Any],
    generation: Mapping[str, Any] | None = None,
    *,
    where: str = "config.json",
) -> tuple[int, ...]:
    """`eos_token_id` (an id, a list or null), the generation config's if it has one."""
    of_generation = str(pathlib.Path(where).with_name(GENERATION_FILE))
    for file, source in ((of_generation, generation or {}), (where, values)):
        found = source.get("eos_token_id")
        if found is None:
            continue
        ids = found if isinstance(found, list) else [found]
        if not all(type(i) is int for i in ids):
            raise ValueError(
                f"{file}: eos_token_id must be an integer or a list of integers, got "
                f"{found!r}"
            )
        return tuple(dict.fromkeys(ids))
    return ()


def stored_dtype(values: Mapping[str, Any], *, where: str = "config.json") -> str:
    """`dtype`, else `torch_dtype`, else float32."""
    found = (values.get("dtype"), values.get("torch_dtype"), "float32")
    name = next(one for one in found if one is not None)
    if name not in DTYPES:
        raise ValueError(f"{where}: dtype must be one of {DTYPES}, got {name!r}")
    return name


def read_generation_config(folder: pathlib.Path) -> dict[str, Any] | None:
    """`generation_config.json` of a folder, None when it has none."""
    path = folder / GENERATION_FILE
    return tensor_files.read_json(path) if path.is_file() else None


def check_supported(values: Mapping[str, Any], *, where: str = "config.json") -> None:
    """Raises ValueError for a field that changes the maths and is not implemented."""
    for key, value in values.items():
        allowed = _NEUTRAL.get(key)
        if allowed is None:
            parts = [v for part, v in _NEUTRAL_PARTS.items() if part in key]
            allowed = parts[0] if parts else None
        if allowed is not None and value not in allowed:
            raise ValueError(f"{where}: {key} = {value!r} is not supported")
    if values.get("hidden_act") is None:
        raise ValueError(f"{where}: missing field 'hidden_act'")
    window, switch = values.get("sliding_window"), values.get("use_sliding_window")
    # Qwen files carry an unused window; in the others a window is a window.
    unused = values.get("model_type") in ("qwen2", "qwen3") and not switch
    if switch or (window and not unused):
        raise ValueError(
            f"{where}: sliding_window = {window!r} is in use and not supported"
        )
    kinds = values.get("layer_types")
    if not isinstance(kinds, list | tuple | None):
        raise ValueError(f"{where}: layer_types must be a list, got {kinds!r}")
    for kind in kinds or ():
        if kind != "full_attention":
            raise ValueError(
                f"{where}: layer_types must be 'full_attention', got {kind!r}"
            )


def integer(
    values: Mapping[str, Any], name: str, default: int | None = None, *, where: str
) -> int:
    """A positive integer field; absent and null take the default, if there is one."""
    value = values.get(name)
    value = default if value is None else value
    if value is None:
        raise ValueError(f"{where}: missing field {name!r}")
    if type(value) is not int or value <= 0:
        raise ValueError(f"{where}: {name} must be a positive integer, got {value!r}")
    return value


def number(
    values: Mapping[str, Any], name: str, default: float | None = None, *, where: str
) -> float:
    """A positive finite number; absent and null take the default, if there is one."""
    value = values.get(name)
    value = default if value is None else value
    if value is None:
        raise ValueError(f"{where}: missing field {name!r}")
    if type(value) not in (int, float) or not 0 < value < float("inf"):
        raise ValueError(f"{where}: {name} must be a positive number, got {value!r}")
    return float(value)


def flag(values: Mapping[str, Any], name: str, default: bool, *, where: str) -> bool:
    """A boolean field; absent and null take the default."""
    value = values.get(name)
    value = default if value is None else value
    if type(value) is not bool:
        raise ValueError(f"{where}: {name} must be true or false, got {value!r}")
    return value


def _prefixed(where: str, error: ValueError) -> str:
    message = str(error)
    return message if message.startswith(where) else f"{where}: {message}"
