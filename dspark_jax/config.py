"""Frozen, hashable configurations of models and decoding, and a strict TOML reader.

A configuration is static under `jit`: two equal ones give one compiled program. Values
are validated when the object is made, so that no later code has to.
"""

import dataclasses
import difflib
import pathlib
import tomllib
import types
import typing
from typing import Any, Literal, TypeVar

T = TypeVar("T")

RULES = ("token", "block", "seeded")
MODES = ("plain", "static", "compact", "cap-accept")  # of serving
MARKOV_KINDS = ("none", "vanilla", "gated", "rnn")
CONFIDENCE_KINDS = ("none", "plain", "markov")
ROPE_KINDS = ("default", "linear", "llama3")
Attention = Literal["auto", "xla", "mosaic_gpu", "triton", "mosaic_tpu"]
ATTENTIONS = typing.get_args(Attention)
DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding: base frequency and its rescaling for long contexts.

    `kind` "linear" divides all frequencies by `factor`; "llama3" divides only the slow
    ones, with a smooth passage between `original_max_position / high_freq_factor` and
    `original_max_position / low_freq_factor` (Llama 3.1).
    """

    theta: float = 10000.0
    kind: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192

    def __post_init__(self):
        check_types(self)
        _one_of("rope.kind", self.kind, ROPE_KINDS)
        _positive("rope.theta", self.theta)
        _positive("rope.factor", self.factor)
        _positive("rope.low_freq_factor", self.low_freq_factor)
        _positive("rope.original_max_position", self.original_max_position)
        if self.kind == "llama3" and not self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                "rope.low_freq_factor must be below rope.high_freq_factor, got "
                f"{self.low_freq_factor} and {self.high_freq_factor}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """One pre-norm transformer block of the Llama/Qwen3 family (attention + SwiGLU)."""

    width: int
    num_heads: int
    num_kv_heads: int
    head_width: int
    ffn_width: int
    rms_eps: float = 1e-6
    rope: RopeConfig = dataclasses.field(default_factory=RopeConfig)
    qk_norm: bool = False
    attention_bias: bool = False  # on the query, key and value projections
    output_bias: bool = False  # on the attention's output projection
    mlp_bias: bool = False

    def __post_init__(self):
        check_types(self)
        for name in ("width", "num_heads", "num_kv_heads", "head_width", "ffn_width"):
            _positive(name, getattr(self, name))
        _positive("rms_eps", self.rms_eps)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads must be a multiple of num_kv_heads, got {self.num_heads} "
                f"and {self.num_kv_heads}"
            )
        if self.head_width % 2:
            raise ValueError(f"head_width must be even, got {self.head_width}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """A decoder-only target of the Llama/Qwen3 family.

    `attention` is how its cache is attended, and that of its drafter: "xla", a kernel's
    name, or "auto": XLA, or mosaic_gpu where that was measured faster. `fingerprint`
    names the weights by their sizes and the final norm: loaders set it, and a drafter
    trained for another one is refused. An empty one is not checked.
    """

    vocab_size: int
    num_layers: int
    block: BlockConfig
    max_position: int
    tied_embeddings: bool = True
    stop_tokens: tuple[int, ...] = ()
    param_dtype: str = "float32"
    compute_dtype: str = "float32"
    fingerprint: str = ""
    attention: Attention = "auto"

    def __post_init__(self):
        check_types(self)
        for name in ("vocab_size", "num_layers", "max_position"):
            _positive(name, getattr(self, name))
        _one_of("attention", self.attention, ATTENTIONS)
        _one_of("param_dtype", self.param_dtype, DTYPES)
        _one_of("compute_dtype", self.compute_dtype, DTYPES)
        for token in self.stop_tokens:
            _in_vocabulary("stop_tokens", token, self.vocab_size)

    @property
    def width(self) -> int:
        return self.block.width


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """A DSpark drafter: DFlash backbone, Markov head, confidence head (paper 3.1).

    `markov_kind` "none" is DFlash. `tap_layers` are raw outputs of the target's layers
    (0-based, strictly increasing; -1 = embedding output). `block_size` is the paper's
    γ: the largest `draft_length`. `target_fingerprint` names the target's weights.
    """

    vocab_size: int
    num_layers: int
    block: BlockConfig
    max_position: int
    block_size: int
    mask_token: int
    tap_layers: tuple[int, ...]
    num_target_layers: int
    markov_kind: Literal["none", "vanilla", "gated", "rnn"] = "vanilla"
    markov_rank: int = 256
    confidence_kind: Literal["none", "plain", "markov"] = "markov"
    param_dtype: str = "float32"
    compute_dtype: str = "float32"
    target_fingerprint: str = ""

    def __post_init__(self):
        check_types(self)
        for name in ("vocab_size", "num_layers", "max_position", "block_size"):
            _positive(name, getattr(self, name))
        _one_of("markov_kind", self.markov_kind, MARKOV_KINDS)
        _one_of("confidence_kind", self.confidence_kind, CONFIDENCE_KINDS)
        _one_of("param_dtype", self.param_dtype, DTYPES)
        _one_of("compute_dtype", self.compute_dtype, DTYPES)
        _in_vocabulary("mask_token", self.mask_token, self.vocab_size)
        if self.markov_kind == "none":
            if self.markov_rank != 0:
                raise ValueError(
                    "markov_rank must be 0 when markov_kind is 'none', got "
                    f"{self.markov_rank}"
                )
            if self.confidence_kind == "markov":
                raise ValueError(
                    "confidence_kind 'markov' needs a Markov head, but markov_kind is "
                    "'none'"
                )
        else:
            _positive("markov_rank", self.markov_rank)
        if not self.tap_layers:
            raise ValueError("tap_layers must name at least one target layer, got ()")
        if list(self.tap_layers) != sorted(set(self.tap_layers)):
            raise ValueError(
                f"tap_layers must be strictly increasing, got {self.tap_layers}"
            )
        if self.tap_layers[0] < -1 or self.tap_layers[-1] >= self.num_target_layers:
            raise ValueError(
                f"tap_layers must lie in -1..{self.num_target_layers - 1}, got "
                f"{self.tap_layers}"
            )

    @property
    def width(self) -> int:
        return self.block.width


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speculation:
    """How to speculate: the static choices of `speculative_generate`.

    Attributes:
      draft_length: K, tokens drafted a round, 1 to the drafter's block size; None takes
        the block size.
      rule: "token" (rejection sampling), "block" (arXiv 2403.10444) or "seeded"
        (arXiv 2408.07978). All three leave the target's distribution unchanged.
      keep: a predicate `keep(k, confidence, survival) -> bool [B]` that ends the verify
        window at its first False, evaluated for k = 0..K-1 from left to right on
        float32 [B]; a module-level function, since it is part of the static key.
      candidates: draft among the N best base logits of each position only; None drafts
        from the whole (draft) vocabulary.
    """

    draft_length: int | None = None
    rule: Literal["token", "block", "seeded"] = "token"
    keep: typing.Callable[..., Any] | None = None
    candidates: int | None = None

    def __post_init__(self):
        check_types(self)
        _one_of("rule", self.rule, RULES)
        if self.draft_length is not None:
            _positive("draft_length", self.draft_length)
        if self.candidates is not None:
            _positive("candidates", self.candidates)
        if self.keep is not None and not callable(self.keep):
            raise TypeError(f"keep must be a function, got {self.keep!r}")


def from_dict(config_type: type[T], values: dict[str, Any], name: str = "") -> T:
    """Builds a configuration dataclass from nested dicts; an unknown key is an error.

    Raises:
      ValueError: unknown or missing key, with its dotted path.
      TypeError: a value of the wrong type.
    """
    hints = typing.get_type_hints(config_type)
    fields = {f.name: f for f in dataclasses.fields(config_type)}  # type: ignore[arg-type]
    unknown = sorted(set(values) - set(fields))
    if unknown:
        near = difflib.get_close_matches(unknown[0], fields, n=1, cutoff=0.5)
        hint = f"; the nearest one is {near[0]!r}" if near else ""
        raise ValueError(
            f"unknown key {_join(name, unknown[0])!r}; known keys: "
            f"{', '.join(sorted(fields))}{hint}"
        )
    missing = sorted(
        key
        for key, field in fields.items()
        if key not in values
        and field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
    )
    if missing:
        raise ValueError(f"missing key {_join(name, missing[0])!r}")
    return config_type(
        **{
            key: _convert(hints[key], value, _join(name, key))
            for key, value in values.items()
        }
    )


def load_toml(path: str | pathlib.Path, config_type: type[T]) -> T:
    """Reads a TOML file into `config_type`, strictly (see `from_dict`)."""
    return from_dict(config_type, read_toml(path))


def read_toml(path: str | pathlib.Path) -> dict[str, Any]:
    """Reads a TOML file; a damaged one is a ValueError that names it."""
    with open(path, "rb") as file:
        try:
            return tomllib.load(file)
        except ValueError as error:  # TOML, or UTF-8
            raise ValueError(f"{path} is not valid TOML: {error}") from error


def check_types(config: Any) -> None:
    """Raises TypeError unless every field of a configuration holds what it declares.

    An int passes for a float, a bool never for an int; a list is refused where a tuple
    is declared, since a configuration must be hashable.
    """
    for name, hint in typing.get_type_hints(type(config)).items():
        value = getattr(config, name)
        if not _has_type(hint, value):
            expected = getattr(hint, "__name__", None)
            if typing.get_origin(hint) is not None:
                expected = str(hint).replace("typing.", "")
            raise TypeError(f"{name} must be {expected}, got {value!r}")


def _has_type(hint: Any, value: Any) -> bool:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_has_type(arg, value) for arg in args)
    if origin is tuple:  # tuple[X, ...]
        return type(value) is tuple and all(_has_type(args[0], item) for item in value)
    if hint is float:
        return type(value) in (int, float)
    if dataclasses.is_dataclass(hint):
        return isinstance(value, typing.cast(type, hint))
    if isinstance(hint, type) and origin is None:
        return type(value) is hint
    return True  # Literal and Callable: `__post_init__` has better words.


def _convert(hint: Any, value: Any, name: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, dict):
            raise TypeError(f"{name} must be a table, got {type(value).__name__}")
        return from_dict(typing.cast(type, hint), value, name)
    if origin in (typing.Union, types.UnionType):
        if value is None:
            return None
        (inner,) = (arg for arg in args if arg is not type(None))
        return _convert(inner, value, name)
    if origin is Literal:
        if value not in args:
            raise ValueError(f"{name} must be one of {args}, got {value!r}")
        return value
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise TypeError(f"{name} must be a list, got {type(value).__name__}")
        return tuple(_convert(args[0], item, name) for item in value)
    if hint is float and type(value) is int:
        return float(value)
    if hint is Any or (isinstance(hint, type) and type(value) is hint):
        return value
    expected = getattr(hint, "__name__", str(hint))
    raise TypeError(f"{name} must be {expected}, got {value!r}")


def _join(parent: str, key: str) -> str:
    return f"{parent}.{key}" if parent else key


def _one_of(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {allowed}, got {value!r}")


def _positive(name: str, value: float) -> None:
    if not value > 0:
        raise ValueError(f"{name} must be positive, got {value}")


def _in_vocabulary(name: str, token: int, vocab_size: int) -> None:
    if not 0 <= token < vocab_size:
        raise ValueError(
            f"{name} must lie in 0..{vocab_size - 1} (the vocabulary), got {token}"
        )
