"""DeepSpec's config.json, both ways.

Head and block settings are read at top level and nested in `dflash_config` or
`dspark_config`, and written at top level, where every system looks. What would be
drafted differently is refused by name, and a missing mask token is an error (elsewhere
it silently becomes 0).
"""

from collections.abc import Mapping
from typing import Any

from dspark_jax.config import MARKOV_KINDS, DrafterConfig, RopeConfig
from dspark_jax.targets import hf_config

ARCHITECTURES = ("Qwen3DSparkModel", "DSparkDraftModel")
DTYPES = ("float32", "bfloat16")
NESTED = ("dflash_config", "dspark_config")
# Head and block settings, at top level or nested.
_SETTINGS = (
    "block_size",
    "mask_token_id",
    "target_layer_ids",
    "num_target_layers",
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
)
# Settings that are supported at one value only (None: absent).
_FIXED: dict[str, tuple[Any, ...]] = {
    "projector_type": (None, "dspark", "dflash"),
    "attention_mode": (None, "gqa", "mha"),
    "sample_from_anchor": (None, True),
    "draft_vocab_size": (None,),
    "rope_is_neox_style": (None, True),
    "use_target_embedding_scale": (None, False),
    "tie_word_embeddings": (None, False),
    "model_type": (None, "qwen3"),
}
_MODEL_KEYS = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "rms_norm_eps",
    "attention_bias",
    "max_position_embeddings",
    "vocab_size",
    "rope_parameters",
    "layer_types",
    "dtype",
    "target_fingerprint",
)
# Written when no `extra_config` says otherwise; DeepSpec's own readers ask for them.
_DEFAULT_EXTRA = {
    "architectures": ["Qwen3DSparkModel"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "initializer_range": 0.02,
    "max_window_layers": 28,
    "num_anchors": 512,
    "sliding_window": None,
    "use_cache": True,
    "use_sliding_window": False,
}
# Written even where `extra_config` lacks them: no reader works without.
_REQUIRED_EXTRA = ("architectures", "model_type", "hidden_act", "tie_word_embeddings")


def drafter_config(
    values: Mapping[str, Any],
    *,
    where: str = "config.json",
    compute_dtype: str | None = None,
) -> DrafterConfig:
    """The configuration of a drafter from its config.json.

    Args:
      values: the JSON object.
      where: the name of the file, for messages.
      compute_dtype: None takes the file's dtype.

    Raises:
      ValueError: a setting that is missing, contradictory or not supported.
    """
    _check_supported(values, where)
    settings = {name: _setting(values, name, where) for name in _SETTINGS}
    if settings["mask_token_id"] is None:
        raise ValueError(f"{where}: missing field 'mask_token_id' (it has no default)")
    for name in ("mask_token_id", "markov_rank"):
        value = settings[name]
        if value is not None and (type(value) is not int or value < 0):
            raise ValueError(
                f"{where}: {name} must be an integer from 0, got {value!r}"
            )
    taps = settings["target_layer_ids"]
    if not isinstance(taps, list) or not all(type(layer) is int for layer in taps):
        raise ValueError(
            f"{where}: target_layer_ids must be a list of integers, got {taps!r}"
        )
    rank = settings["markov_rank"] or 0
    kind = settings["markov_head_type"] or "vanilla"
    if kind not in MARKOV_KINDS[1:]:
        raise ValueError(
            f"{where}: markov_head_type must be one of {MARKOV_KINDS[1:]}, got {kind!r}"
        )
    confidence = "none"
    if hf_config.flag(settings, "enable_confidence_head", False, where=where):
        name = "confidence_head_with_markov"
        has_markov = hf_config.flag(settings, name, False, where=where)
        confidence = "markov" if has_markov else "plain"
    dtype = hf_config.stored_dtype(values, where=where)
    if dtype not in DTYPES:
        raise ValueError(f"{where}: dtype must be one of {DTYPES}, got {dtype!r}")
    block = hf_config.block_config({**values, "model_type": "qwen3"}, where=where)
    try:
        return DrafterConfig(
            vocab_size=hf_config.integer(values, "vocab_size", where=where),
            num_layers=hf_config.integer(values, "num_hidden_layers", where=where),
            block=block,
            max_position=hf_config.integer(
                values, "max_position_embeddings", where=where
            ),
            block_size=hf_config.integer(settings, "block_size", where=where),
            mask_token=settings["mask_token_id"],
            tap_layers=tuple(taps),
            num_target_layers=hf_config.integer(
                settings, "num_target_layers", where=where
            ),
            markov_kind=kind if rank else "none",  # type: ignore[arg-type]
            markov_rank=rank,
            confidence_kind=confidence,  # type: ignore[arg-type]
            param_dtype=dtype,
            compute_dtype=compute_dtype or dtype,
            target_fingerprint=_fingerprint(values, where),
        )
    except ValueError as error:
        message = str(error)
        prefix = "" if message.startswith(where) else f"{where}: "
        raise ValueError(prefix + message) from error


def extra(values: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of config.json that `drafter_config` does not hold."""
    kept = {k: v for k, v in values.items() if k not in (*_SETTINGS, *_MODEL_KEYS)}
    for name in NESTED:
        if isinstance(kept.get(name), Mapping):
            kept[name] = {k: v for k, v in kept[name].items() if k not in _SETTINGS}
    return kept


def config_json(
    config: DrafterConfig, extra_config: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The config.json of a drafter, with DeepSpec's names.

    Raises:
      ValueError: the layout cannot express the configuration.
    """
    block = config.block
    for name, value, needed in (
        ("param_dtype", config.param_dtype, DTYPES),
        ("block.qk_norm", block.qk_norm, (True,)),
        ("block.mlp_bias", block.mlp_bias, (False,)),
        ("block.output_bias", block.output_bias, (block.attention_bias,)),
    ):
        if value not in needed:
            raise ValueError(
                f"DeepSpec's layout needs {name} to be one of {needed}, got {value!r}"
            )
    given = _DEFAULT_EXTRA if extra_config is None else extra(extra_config)
    values = {
        **{name: _DEFAULT_EXTRA[name] for name in _REQUIRED_EXTRA},
        **given,
        "block_size": config.block_size,
        "mask_token_id": config.mask_token,
        "target_layer_ids": list(config.tap_layers),
        "num_target_layers": config.num_target_layers,
        "markov_rank": config.markov_rank,
        "enable_confidence_head": config.confidence_kind != "none",
        "num_hidden_layers": config.num_layers,
        "hidden_size": block.width,
        "num_attention_heads": block.num_heads,
        "num_key_value_heads": block.num_kv_heads,
        "head_dim": block.head_width,
        "intermediate_size": block.ffn_width,
        "rms_norm_eps": block.rms_eps,
        "attention_bias": block.attention_bias,
        "max_position_embeddings": config.max_position,
        "vocab_size": config.vocab_size,
        "rope_parameters": _rope_parameters(block.rope),
        "layer_types": ["full_attention"] * config.num_layers,
        "dtype": config.param_dtype,
    }
    if config.markov_kind != "none":
        values["markov_head_type"] = config.markov_kind
    if config.confidence_kind != "none":
        values["confidence_head_with_markov"] = config.confidence_kind == "markov"
    if config.target_fingerprint:
        values["target_fingerprint"] = config.target_fingerprint
    # Older keys that say the same, where the file had them.
    if "torch_dtype" in values:
        values["torch_dtype"] = config.param_dtype
    if "rope_theta" in values:
        values["rope_theta"] = block.rope.theta
    if "rope_scaling" in values:
        scaling = _rope_parameters(block.rope)
        del scaling["rope_theta"]
        values["rope_scaling"] = None if block.rope.kind == "default" else scaling
    return values


def _check_supported(values: Mapping[str, Any], where: str) -> None:
    architectures = values.get("architectures")
    if not isinstance(architectures, list | None):
        raise ValueError(
            f"{where}: architectures must be a list, got {architectures!r}"
        )
    for architecture in architectures or ():
        if architecture not in ARCHITECTURES:
            raise ValueError(
                f"{where}: architectures must be one of {ARCHITECTURES}, got "
                f"{architecture!r}"
            )
    for name in NESTED:
        if not isinstance(values.get(name, {}), Mapping):
            raise ValueError(f"{where}: {name} must be an object, got {values[name]!r}")
    for name, supported in _FIXED.items():
        value = _setting(values, name, where)
        if value not in supported:
            raise ValueError(f"{where}: {name} = {value!r} is not supported")
    for name in NESTED:
        nested = {"hidden_act": "silu", **values.get(name, {})}
        hf_config.check_supported(nested, where=f"{where}: {name}")


def _setting(values: Mapping[str, Any], name: str, where: str) -> Any:
    """A setting from the top level or a nested object; both only if they agree."""
    places = [values, *(values.get(nested) or {} for nested in NESTED)]
    found = [place[name] for place in places if place.get(name) is not None]
    if any(value != found[0] for value in found):
        raise ValueError(
            f"{where}: {name} must be the same at top level and nested, got {found}"
        )
    return found[0] if found else None


def _fingerprint(values: Mapping[str, Any], where: str) -> str:
    value = values.get("target_fingerprint") or ""
    if not isinstance(value, str):
        raise ValueError(f"{where}: target_fingerprint must be text, got {value!r}")
    return value


def _rope_parameters(rope: RopeConfig) -> dict[str, Any]:
    values: dict[str, Any] = {"rope_theta": rope.theta, "rope_type": rope.kind}
    if rope.kind != "default":
        values["factor"] = rope.factor
    if rope.kind == "llama3":
        values["low_freq_factor"] = rope.low_freq_factor
        values["high_freq_factor"] = rope.high_freq_factor
        values["original_max_position_embeddings"] = rope.original_max_position
    return values
