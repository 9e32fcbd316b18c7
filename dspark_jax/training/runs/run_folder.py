"""The folder of a training run: what lies where, and whether a run can go on in it.

    config.toml, config.json   the configuration with every value spelled out
    corpus.npz                 texts that the target wrote (without `corpus`)
    plan.json                  what was fixed at the first start: steps, tap factors
    metrics.jsonl              a record every `log_every` steps, held-out records
    checkpoints/STEP           states, for a restart
    drafters/NAME              drafters in DeepSpec's layout, of the last checkpoint
    plots/*.png, events/       curves; TensorBoard
    run.json                   the figures of a finished run

A run may be killed at any moment: every file appears complete or not at all, and a
restart uses what is there.
"""

import dataclasses
import json
import os
import pathlib
import shutil
from typing import Any

from dspark_jax import config as config_lib
from dspark_jax import tensor_files
from dspark_jax.training.runs import run_config
from dspark_jax.training.runs.run_config import RunConfig

_FORMAT = "dspark-training-run"
_FILES = (
    "config.toml",
    "corpus.npz",
    "plan.json",
    "metrics.jsonl",
    "run.json",
    "config.json",  # last: it marks the folder as a run's
)
_FOLDERS = ("checkpoints", "drafters", "plots", "events")


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """Paths of a run, its records and its small files; `open_folder` makes one."""

    path: pathlib.Path
    config: RunConfig
    is_resumed: bool

    @property
    def corpus(self) -> pathlib.Path:
        return self.path / "corpus.npz"

    @property
    def metrics(self) -> pathlib.Path:
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> pathlib.Path:
        return self.path / "checkpoints"

    @property
    def plots(self) -> pathlib.Path:
        return self.path / "plots"

    @property
    def events(self) -> pathlib.Path:
        return self.path / "events"

    def drafter(self, name: str) -> pathlib.Path:
        return self.path / "drafters" / name

    def read_plan(self) -> dict[str, Any] | None:
        """What the first start fixed; None before that."""
        return _read_optional(self.path / "plan.json")

    def write_plan(self, plan: dict[str, Any]) -> None:
        tensor_files.write_json(self.path / "plan.json", plan)

    def read_result(self) -> dict[str, Any] | None:
        """The figures of the finished run; None before that."""
        return _read_optional(self.path / "run.json")

    def write_result(self, result: dict[str, Any]) -> None:
        tensor_files.write_json(self.path / "run.json", result)

    def append(self, record: dict[str, Any]) -> None:
        """Adds one JSON object as a line of metrics.jsonl."""
        with self.metrics.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def read_records(self) -> list[dict[str, Any]]:
        """The records of metrics.jsonl; a line that was cut off is left out."""
        if not self.metrics.is_file():
            return []
        records = []
        for line in self.metrics.read_bytes().splitlines():
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict) and isinstance(record.get("step"), int):
                records.append(record)
        return records

    def drop_records_after(self, step: int) -> int:
        """Drops records past `step`, which will be made again; returns their number."""
        records = self.read_records()
        kept = [record for record in records if record["step"] <= step]
        lines = "".join(json.dumps(record) + "\n" for record in kept).encode()
        if self.metrics.is_file() and self.metrics.read_bytes() != lines:
            tensor_files.write_bytes(self.metrics, lines)
        return len(records) - len(kept)


def open_folder(
    path: str | os.PathLike,
    config: RunConfig,
    *,
    is_fresh: bool = False,
    must_resume: bool = False,
) -> RunFolder:
    """Starts a run in a new or empty folder, or goes on with the run that it holds.

    Args:
      is_fresh: delete the run that the folder holds, and nothing else.
      must_resume: refuse a folder without a run.

    Raises:
      ValueError: the folder holds something else, or a run of another configuration;
        `must_resume` and there is no run.
    """
    path = pathlib.Path(path)
    stored = _read_marker(path)
    if stored is None and must_resume:
        raise ValueError(f"there is no run to resume in {path}")
    if stored is not None and is_fresh:
        _delete_run(path)
        stored = None
    if stored is not None and not must_resume and _has_only_begun(path):
        stored = None  # nothing is lost by another configuration
    if stored is None:
        path.mkdir(parents=True, exist_ok=True)
        tensor_files.write_json(
            path / "config.json",
            {"format": _FORMAT, "config": dataclasses.asdict(config)},
        )
    else:
        changed = run_config.differences(stored, config)
        if changed:
            raise ValueError(
                f"{path} holds a run of another configuration ({'; '.join(changed)}): "
                "take another folder, or start anew with --fresh"
            )
    tensor_files.write_bytes(path / "config.toml", run_config.to_toml(config).encode())
    return RunFolder(path, config, is_resumed=stored is not None)


def _has_only_begun(path: pathlib.Path) -> bool:
    """Whether a start left its configuration and nothing else."""
    return {entry.name for entry in path.iterdir()} <= {"config.json", "config.toml"}


def _read_marker(path: pathlib.Path) -> RunConfig | None:
    """The configuration of the run in a folder; None if it is empty or absent."""
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path} is a file; a run needs a folder")
    if not path.is_dir():
        return None
    marker = path / "config.json"
    if not marker.is_file():
        # A first start that was killed leaves at most a temporary file.
        others = [p.name for p in path.iterdir() if not p.name.startswith(".config.")]
        if others:
            raise ValueError(
                f"{path} is not empty and holds no training run: it is left as it is"
            )
        return None
    values = tensor_files.read_json(marker)
    config = values.get("config")
    if values.get("format") != _FORMAT or not isinstance(config, dict):
        raise ValueError(
            f"{path} holds something else than a training run ({marker.name} does not "
            "say so): it is left as it is"
        )
    try:
        return config_lib.from_dict(RunConfig, config)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{marker} is damaged or of another version: {error}"
        ) from error


def _delete_run(path: pathlib.Path) -> None:
    for name in _FOLDERS:
        if (path / name).is_dir() and not (path / name).is_symlink():
            shutil.rmtree(path / name)
    for name in _FILES:
        (path / name).unlink(missing_ok=True)


def _read_optional(path: pathlib.Path) -> dict[str, Any] | None:
    return tensor_files.read_json(path) if path.is_file() else None
