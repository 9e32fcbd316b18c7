"""What all figures share: size, style, one legend, and a file that is whole or absent.

matplotlib is the extra `plots`.
"""

import contextlib
import importlib.util
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

MISSING = (
    "figures need matplotlib, which is not installed: pip install 'dspark-jax[plots]'"
)
PANEL = (3.4, 3.0)  # inches
_STYLE: Any = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "font.size": 9,
    "savefig.dpi": 150,
}


def check_installed() -> None:
    """Raises ImportError, with the extra's name, unless matplotlib is there."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError(MISSING)


@contextlib.contextmanager
def figure(
    path: str | os.PathLike, panels: int, width: float = PANEL[0]
) -> Iterator[Any]:
    """Axes in one row; the figure is written to `path` when the block ends.

    Nothing global changes: no backend is chosen and no state of pyplot is touched.
    """
    check_installed()
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        size = (panels * width, PANEL[1])
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(figure)
        yield figure.subplots(1, panels, squeeze=False)[0]
        path = pathlib.Path(path)
        temporary = path.with_name(f".{path.name}.partial")
        try:
            figure.savefig(temporary, format="png")
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def legend(axis: Any, handles: Sequence[Any] | None = None) -> None:
    """One legend for the whole figure, below it."""
    if handles is None:
        handles = axis.get_legend_handles_labels()[0]
    axis.figure.legend(
        handles=handles, loc="outside lower center", ncols=min(len(handles), 4)
    )
