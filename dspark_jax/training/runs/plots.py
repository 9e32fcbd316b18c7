"""Curves of a run as PNG files, drawn from its records (the extra `plots`)."""

import importlib.util
import io
import os
import pathlib
from collections.abc import Callable, Iterable
from typing import Any

from dspark_jax import tensor_files

Record = dict[str, Any]


def is_wanted(wanted: bool | None) -> bool:
    """Whether to draw: as asked, or None: where matplotlib is installed.

    Raises:
      ImportError: asked for and not installed.
    """
    is_installed = importlib.util.find_spec("matplotlib") is not None
    if wanted and not is_installed:
        raise ImportError(
            "plots = true needs the package matplotlib: pip install 'dspark-jax[plots]'"
        )
    return is_installed if wanted is None else wanted


def draw(folder: str | os.PathLike, records: list[Record]) -> None:
    """Writes loss.png, accepted_length.png and acceptance.png, each atomically.

    The last one shows acceptance by position: of the newest held-out record, or of the
    newest training record as long as there is none.
    """
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    trained = [record for record in records if "drafters" in record]
    held_out = [record for record in records if "held_out" in record]

    def curve(name: str) -> Callable[[Any], None]:
        def fill(axes: Any) -> None:
            for drafter, steps, values in _curves(trained, "drafters", name):
                axes.plot(steps, values, linewidth=1, label=drafter)
            axes.set_prop_cycle(None)
            for drafter, steps, values in _curves(held_out, "held_out", name):
                axes.plot(
                    steps, values, "o--", markersize=3, label=f"{drafter}, held out"
                )
            axes.set_xlabel("step")

        return fill

    def acceptance(axes: Any) -> None:
        newest = held_out[-1:] or trained[-1:]
        for record in newest:
            kind = "held_out" if "held_out" in record else "drafters"
            for drafter, values in record[kind].items():
                rates = values["accept_rate"]
                axes.plot(range(1, len(rates) + 1), rates, "o-", label=drafter)
            axes.set_title(f"step {record['step']}")
        axes.set_xlabel("draft position")
        axes.set_ylim(0, 1)

    _write(folder / "loss.png", "loss", curve("loss"))
    _write(
        folder / "accepted_length.png",
        "accepted length (teacher forcing)",
        curve("tau_probabilistic"),
    )
    _write(folder / "acceptance.png", "conditional acceptance", acceptance)


def _curves(
    records: list[Record], kind: str, name: str
) -> Iterable[tuple[str, list[int], list[float]]]:
    names = dict.fromkeys(drafter for record in records for drafter in record[kind])
    for drafter in names:
        points = [
            (record["step"], record[kind][drafter][name])
            for record in records
            if drafter in record[kind]
        ]
        yield drafter, [step for step, _ in points], [value for _, value in points]


def _write(path: pathlib.Path, label: str, fill: Callable[[Any], None]) -> None:
    from matplotlib.figure import Figure  # an extra; no global state as in pyplot

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    fill(axes)
    axes.set_ylabel(label)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="small")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    tensor_files.write_bytes(path, buffer.getvalue())
