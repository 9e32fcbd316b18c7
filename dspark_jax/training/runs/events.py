"""TensorBoard events of a run, written by tensorboardX (the extra `tensorboard`)."""

import importlib
import importlib.util
import os
from typing import Any

_PACKAGE = "tensorboardX"


def is_wanted(wanted: bool | None) -> bool:
    """Whether to write events: as asked, or None: where tensorboardX is installed.

    Raises:
      ImportError: asked for and not installed.
    """
    is_installed = importlib.util.find_spec(_PACKAGE) is not None
    if wanted and not is_installed:
        raise ImportError(
            "tensorboard = true needs the package tensorboardX: "
            "pip install 'dspark-jax[tensorboard]'"
        )
    return is_installed if wanted is None else wanted


class Events:
    """An event file; events past `step` of an earlier start are hidden."""

    def __init__(self, folder: str | os.PathLike, step: int):
        module = importlib.import_module(_PACKAGE)
        self._writer = module.SummaryWriter(os.fspath(folder), purge_step=step + 1)

    def add(self, record: dict[str, Any]) -> None:
        """Adds the numbers of a record of metrics.jsonl."""
        step = record["step"]
        for name in ("learning_rate", "tokens_per_second"):
            if name in record:
                self._writer.add_scalar(f"run/{name}", record[name], step)
        for kind in ("drafters", "held_out"):
            for drafter, values in record.get(kind, {}).items():
                for name, value in values.items():
                    self._add(f"{kind}/{name}/{drafter}", value, step)

    def close(self) -> None:
        self._writer.close()

    def _add(self, name: str, value: Any, step: int) -> None:
        if isinstance(value, list):
            for slot, one in enumerate(value):
                self._writer.add_scalar(f"{name}/slot{slot}", one, step)
        else:
            self._writer.add_scalar(name, value, step)
