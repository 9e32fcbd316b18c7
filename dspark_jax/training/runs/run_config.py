"""The configuration of a whole run: a strict TOML file, changed by `key=value`.

Everything that decides what is trained is in it; the keys of `FREE` may change between
a run and its resumption, all others may not.
"""

import dataclasses
import pathlib
import re
import tomllib
from collections.abc import Iterable, Sequence
from typing import Any

from dspark_jax import config as config_lib
from dspark_jax.config import DrafterConfig
from dspark_jax.training.settings import DrafterSpec, Recipe, TrainConfig
from dspark_jax.types import Target

# Where a run computes and what it leaves besides its drafters.
FREE = (
    "data_parallel",
    "fsdp",
    "checkpoint_seconds",
    "keep_last",
    "tensorboard",
    "plots",
)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A training run; see `configs/smollm2_dspark.toml`.

    Attributes:
      target: as in `load_target`; frozen.
      drafters: trained together; they share the target's pass.
      train: how a step works.
      block_size, mask_token, tap_layers: as in `DrafterConfig`, of all drafters.
      compute_dtype: of products; master weights are float32.
      seed: of parameters, texts, data order and anchors.
      corpus: a folder of tokenised conversations; absent: the target writes texts first
        (the six keys from `row_length` to `never_sampled`).
      row_length: S, tokens of a written row.
      write_rows: rows written at a time.
      write_seconds, max_rows: texts are written until one of the two is spent.
      max_prefix, max_user: longest prompt, longest sampled user turn, in tokens.
      never_sampled: control tokens, without the end of a turn.
      held_out_rows: rows for evaluation only.
      batch_rows: rows a step.
      micro_steps: parts of a batch whose gradients are averaged: less memory.
      steps: of the run; absent: as many as `train_seconds` allow on this machine.
      checkpoint_seconds: time between checkpoints, which are taken after a log record.
      keep_last, keep_every: the last N checkpoints are kept, and for good one at every
        M steps.
      log_every: steps a record.
      data_parallel, fsdp: devices over which batches are spread, and over which each
        copy of the state is; absent `data_parallel` takes all local devices.
      tensorboard, plots: false never, true always, absent: where installed.
    """

    target: str
    drafters: tuple[DrafterSpec, ...]
    train: TrainConfig
    block_size: int
    mask_token: int
    tap_layers: tuple[int, ...]
    compute_dtype: str = "bfloat16"
    seed: int = 0
    corpus: str | None = None
    row_length: int = 320
    write_rows: int = 2048
    write_seconds: float = 120.0
    max_rows: int = 131072
    max_prefix: int = 176
    max_user: int = 96
    never_sampled: tuple[int, ...] = ()
    held_out_rows: int = 256
    batch_rows: int = 64
    micro_steps: int = 1
    train_seconds: float = 900.0
    steps: int | None = None
    checkpoint_seconds: float = 150.0
    keep_last: int = 2
    keep_every: int | None = None
    log_every: int = 50
    data_parallel: int | None = None
    fsdp: int = 1
    tensorboard: bool | None = None
    plots: bool | None = None

    def __post_init__(self):
        config_lib.check_types(self)
        for name in _AT_LEAST_ONE:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        for name in ("write_seconds", "train_seconds", "checkpoint_seconds"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(
                    f"{name} must be positive and finite, got {getattr(self, name)}"
                )
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must lie in 0..2^32-1, got {self.seed}")
        if self.compute_dtype not in config_lib.DTYPES:
            raise ValueError(
                f"compute_dtype must be one of {config_lib.DTYPES}, got "
                f"{self.compute_dtype!r}"
            )
        for name in ("target", "corpus"):
            if getattr(self, name) == "":
                raise ValueError(f"{name} must not be empty")
        self._check_drafters()
        if self.train.min_block > self.block_size:
            raise ValueError(
                f"train.min_block must be at most block_size = {self.block_size}, got "
                f"{self.train.min_block}"
            )
        self._check_rows()
        if any(token < 0 for token in (self.mask_token, *self.never_sampled)):
            raise ValueError(
                "mask_token and never_sampled must hold ids >= 0, got "
                f"{self.mask_token} and {self.never_sampled}"
            )

    def _check_drafters(self) -> None:
        if not self.drafters:
            raise ValueError("drafters must name at least one drafter, got ()")
        names = [spec.name for spec in self.drafters]
        for name in names:
            if not _NAME.fullmatch(name):
                raise ValueError(
                    "a drafter's name becomes a folder: letters, digits and '._-', "
                    f"beginning with a letter or digit, got {name!r}"
                )
        if len(set(names)) < len(names):
            raise ValueError(f"drafters must have different names, got {names}")

    def _check_rows(self) -> None:
        for name, of in (
            ("held_out_rows", "batch_rows"),
            ("batch_rows", "micro_steps"),
        ):
            if getattr(self, name) % getattr(self, of):
                raise ValueError(
                    f"{name} must be a multiple of {of} = {getattr(self, of)}, got "
                    f"{getattr(self, name)}"
                )
        if self.corpus is not None:
            return
        if self.max_prefix >= self.row_length:
            raise ValueError(
                f"max_prefix must be below row_length = {self.row_length}, got "
                f"{self.max_prefix}"
            )
        needed = max(self.held_out_rows + self.batch_rows, self.write_rows)
        if self.max_rows < needed:
            raise ValueError(
                "max_rows must hold write_rows, and held_out_rows + batch_rows: at "
                f"least {needed}, got {self.max_rows}"
            )


_AT_LEAST_ONE = (
    "block_size",
    "row_length",
    "write_rows",
    "max_rows",
    "max_prefix",
    "max_user",
    "held_out_rows",
    "batch_rows",
    "micro_steps",
    "steps",
    "keep_last",
    "keep_every",
    "log_every",
    "data_parallel",
    "fsdp",
)


def load(path: str | pathlib.Path, changes: Sequence[str] = ()) -> RunConfig:
    """Reads a run's TOML file.

    Args:
      changes: "key=value" each, with dotted keys (`train.learning_rate=3e-4`,
        `drafters.0.num_layers=2`); the value is TOML, or else a plain string, and
        nothing removes the key.

    Raises:
      ValueError: invalid TOML, an unknown key, a value outside its rule.
      TypeError: a value of the wrong type.
      FileNotFoundError: no such file.
    """
    values = config_lib.read_toml(path)
    for change in changes:
        _apply(values, change)
    return config_lib.from_dict(RunConfig, values)


def differences(old: RunConfig, new: RunConfig) -> list[str]:
    """Changes that a resumption must not have, each as "key: old -> new"."""
    before, after = (_flat(dataclasses.asdict(config)) for config in (old, new))
    return [
        f"{key}: {before.get(key)!r} -> {after.get(key)!r}"
        for key in dict.fromkeys([*before, *after])
        if key not in FREE and before.get(key) != after.get(key)
    ]


def to_toml(config: RunConfig) -> str:
    """The configuration with every value spelled out, as a file for `load`."""
    return "\n".join(_table("", dataclasses.asdict(config))) + "\n"


def recipes(config: RunConfig) -> tuple[Recipe, ...]:
    """How each drafter of a run is trained."""
    return tuple(
        Recipe(loss=spec.loss or config.train.loss, trainable=spec.trainable)
        for spec in config.drafters
    )


def drafter_configs(config: RunConfig, target: Target) -> tuple[DrafterConfig, ...]:
    """The drafters' configurations: blocks as the target's, plus q and k norms."""
    block = dataclasses.replace(target.config.block, qk_norm=True)
    return tuple(
        DrafterConfig(
            vocab_size=target.config.vocab_size,
            num_layers=spec.num_layers,
            block=block,
            max_position=target.config.max_position,
            block_size=config.block_size,
            mask_token=config.mask_token,
            tap_layers=config.tap_layers,
            num_target_layers=target.config.num_layers,
            markov_kind=spec.markov_kind,  # type: ignore[arg-type]
            markov_rank=spec.markov_rank,
            confidence_kind=spec.confidence_kind,  # type: ignore[arg-type]
            compute_dtype=config.compute_dtype,
            target_fingerprint=target.config.fingerprint,
        )
        for spec in config.drafters
    )


def _apply(values: dict[str, Any], change: str) -> None:
    key, equals, text = change.partition("=")
    *parents, last = key.strip().split(".")
    if not equals or not last:
        raise ValueError(f"a change must read key=value, got {change!r}")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    inner: Any = values
    for part in parents:
        inner = _item(inner, part, change)
    if isinstance(inner, list):
        _item(inner, last, change)
        inner[int(last)] = value
    elif isinstance(inner, dict) and not text.strip():
        inner.pop(last, None)
    elif isinstance(inner, dict):
        inner[last] = value
    else:
        raise ValueError(f"{change!r}: there is no table {'.'.join(parents)!r}")


def _item(inner: Any, part: str, change: str) -> Any:
    if isinstance(inner, dict):
        return inner.setdefault(part, {})
    if isinstance(inner, list) and part.isdecimal() and int(part) < len(inner):
        return inner[int(part)]
    raise ValueError(f"{change!r}: there is no entry {part!r}")


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    """Leaves by dotted path; lists of tables by number."""
    pairs: Iterable[tuple[Any, Any]]
    if isinstance(value, dict):
        pairs = value.items()
    elif isinstance(value, tuple) and value and isinstance(value[0], dict):
        pairs = enumerate(value)
    else:
        return {name: value}
    found: dict[str, Any] = {}
    for key, inner in pairs:
        found |= _flat(inner, f"{name}.{key}" if name else str(key))
    return found


def _table(name: str, values: dict[str, Any]) -> list[str]:
    """Lines of one table: its own values first, then the tables in it."""
    lines, inner = [], []
    for key, value in values.items():
        path = f"{name}.{key}" if name else key
        if isinstance(value, dict):
            inner += ["", f"[{path}]", *_table(path, value)]
        elif isinstance(value, tuple) and value and isinstance(value[0], dict):
            for item in value:
                inner += ["", f"[[{path}]]", *_table(path, item)]
        elif value is None:
            lines.append(f"# {key} is absent")
        else:
            lines.append(f"{key} = {_literal(value)}")
    return lines + inner


def _literal(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return f"[{', '.join(_literal(item) for item in value)}]"
    if isinstance(value, str):
        # Control characters apart, a JSON string is a TOML string.
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        escaped = re.sub(
            r"[\x00-\x1f\x7f]", lambda found: f"\\u{ord(found[0]):04x}", escaped
        )
        return f'"{escaped}"'
    return repr(value)
