"""Figures of what was measured, as PNG files.

They show what the JSON holds: conditional acceptance by slot (the paper's Figure 2), τ
by domain, τ by depth and by block size (3, 4), threshold curves (5), reliability
diagrams (6), step costs, throughput by load (7), and the roofline of a round.
matplotlib is the extra `plots`.
"""

import contextlib
import importlib.util
import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dspark_jax.evaluation.acceptance import Acceptance, Window
from dspark_jax.evaluation.prompts import ALL
from dspark_jax.evaluation.reliability import Reliability
from dspark_jax.scheduling.costs import Costs, Grid

MISSING = (
    "figures need matplotlib, which is not installed: pip install 'dspark-jax[plots]'"
)
_PANEL = (3.4, 3.0)  # inches
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


def conditional_acceptance(
    path: str | os.PathLike, series: Mapping[str, Mapping[str, Acceptance]]
) -> None:
    """Conditional acceptance by slot, a panel a domain, a line a drafter (Figure 2).

    Args:
      series: drafter -> domain -> Acceptance; bars are the intervals.
    """
    domains = list(next(iter(series.values())))
    with _figure(path, len(domains)) as axes:
        for axis, domain in zip(axes, domains, strict=True):
            for number, (name, found) in enumerate(series.items()):
                values = found[domain].conditional_acceptance
                intervals = found[domain].conditional_interval_95
                known = [k for k, value in enumerate(values) if value is not None]
                y = np.array([values[k] for k in known], float)
                low, high = (
                    np.array([(intervals[k] or (values[k],) * 2)[i] for k in known])
                    for i in (0, 1)
                )
                x = np.array(known) + 1 + 0.06 * (number - (len(series) - 1) / 2)
                axis.errorbar(
                    x, y, yerr=_bars(y, low, high), marker="o", ms=4, capsize=2,
                    label=name,
                )  # fmt: skip
            axis.set_title(domain)
            axis.set_xlabel("draft position")
            axis.set_xticks(range(1, _length(series) + 1))
            axis.set_ylim(top=1.02)
        axes[0].set_ylabel("conditional acceptance")
        _legend(axes[0])


def accepted_length(
    path: str | os.PathLike, series: Mapping[str, Mapping[str, Acceptance]]
) -> None:
    """τ by domain, a bar a drafter, with its interval over prompts."""
    domains = list(next(iter(series.values())))
    with _figure(path, 1, width=max(4.0, 1.1 * len(domains) + 1.5)) as (axis,):
        share = 0.8 / len(series)
        for number, (name, found) in enumerate(series.items()):
            x, y, low, high = [], [], [], []
            for place, domain in enumerate(domains):
                value = found[domain].accepted_length
                if value is not None:
                    interval = found[domain].interval_95 or (value, value)
                    x.append(place + share * (number - (len(series) - 1) / 2))
                    y.append(value)
                    low.append(interval[0])
                    high.append(interval[1])
            bars = _bars(np.array(y), np.array(low), np.array(high))
            axis.bar(x, y, share, yerr=bars, capsize=2, label=name)
        axis.set_xticks(range(len(domains)), domains)
        axis.axhline(1, color="black", lw=0.8)
        axis.set_ylabel("accepted length τ")
        _legend(axis)


def by_size(
    path: str | os.PathLike,
    series: Mapping[str, Sequence[tuple[int, Mapping[str, Acceptance]]]],
    label: str,
) -> None:
    """τ against a drafter's depth or block size, a panel a domain (Figures 3 and 4).

    Args:
      series: line -> [(size, domain -> Acceptance), ...].
      label: what the size is.
    """
    domains = list(next(iter(series.values()))[0][1])
    with _figure(path, len(domains)) as axes:
        for axis, domain in zip(axes, domains, strict=True):
            for name, points in series.items():
                chosen = sorted(
                    (
                        (size, found[domain])
                        for size, found in points
                        if found[domain].accepted_length is not None
                    ),
                    key=lambda point: point[0],
                )
                y = np.array([one.accepted_length for _, one in chosen], float)
                ends = [
                    one.interval_95 or (value, value)
                    for value, (_, one) in zip(y, chosen, strict=True)
                ]
                low, high = (np.array([end[i] for end in ends]) for i in (0, 1))
                axis.errorbar(
                    [size for size, _ in chosen], y, yerr=_bars(y, low, high),
                    marker="o", ms=4, capsize=2, label=name,
                )  # fmt: skip
            axis.set_title(domain)
            axis.set_xlabel(label)
        axes[0].set_ylabel("accepted length τ")
        _legend(axes[0])


def thresholds(path: str | os.PathLike, series: Mapping[str, Sequence[Window]]) -> None:
    """Tokens a round (bars) and acceptance rate (line) by threshold (Figure 5)."""
    with _figure(path, len(series), width=4.2) as axes:
        for axis, (name, windows) in zip(axes, series.items(), strict=True):
            x = [window.threshold for window in windows]
            gaps = np.diff(sorted(x))
            width = 0.7 * float(gaps.min()) if len(gaps) else 0.1
            accepted = np.array([window.accepted_length for window in windows])
            rejected = np.array([w.num_rejected_per_round for w in windows])
            axis.bar(x, accepted, width, label="accepted and bonus")
            axis.bar(
                x, rejected, width, bottom=accepted, label="rejected",
                color="none", edgecolor="gray", hatch="///",
            )  # fmt: skip
            axis.set_title(name)
            axis.set_xlabel("confidence threshold")
            axis.set_ylabel("tokens per round")
            rate = axis.twinx()
            rate.spines["right"].set_visible(True)
            rate.grid(visible=False)
            rate.plot(
                x, [w.acceptance_rate for w in windows], "o-", ms=4, color="C3",
                label="acceptance rate",
            )  # fmt: skip
            rate.set_ylim(0, 1.02)
            rate.set_ylabel("acceptance rate", color="C3")
        _legend(axes[0], [*axes[0].get_legend_handles_labels()[0], *rate.get_lines()])


def reliability(
    path: str | os.PathLike,
    before: Sequence[Reliability],
    after: Sequence[Reliability] | None = None,
    slots: Sequence[int] | None = None,
) -> None:
    """Observed acceptance of prefixes against the predicted one (Figure 6).

    Args:
      before, after: of slots 1..K, raw and calibrated.
      slots: 0-based; None takes every other one, at most four.
    """
    if slots is None:
        known = [k for k, slot in enumerate(before) if slot.num_rounds]
        slots = known[:: max(1, -(-len(known) // 4))] or [0]
    with _figure(path, len(slots)) as axes:
        for axis, k in zip(axes, slots, strict=True):
            edges = np.linspace(0, 1, len(before[k].bins.num_rows) + 1)
            shown = before[k] if after is None else after[k]
            share = shown.bins.num_rows / max(shown.bins.num_rows.max(), 1)
            axis.bar(
                edges[:-1], 0.35 * share, np.diff(edges), align="edge",
                color="lightgray", zorder=0,
            )  # fmt: skip
            axis.plot([0, 1], [0, 1], "--", color="gray", lw=1)
            for name, values, color in (
                ("raw", before, "C3"),
                ("calibrated", after, "C0"),
            ):
                error = None if values is None else values[k].ece
                if values is not None and error is not None:
                    bins = values[k].bins
                    label = f"{name}, ECE {100 * error:.1f} %"
                    kept = bins.num_rows > 0
                    axis.plot(
                        bins.predicted[kept], bins.observed[kept], "o-", ms=3,
                        color=color, label=label,
                    )  # fmt: skip
            area = shown.auroc
            title = f"position {k + 1}"
            axis.set_title(title if area is None else f"{title}, AUROC {area:.3f}")
            axis.set_xlim(0, 1.02)
            axis.set_ylim(0, 1.02)
            axis.set_xlabel("predicted acceptance")
            if axis.get_legend_handles_labels()[0]:
                axis.legend(loc="upper left", fontsize=8)
        axes[0].set_ylabel("observed acceptance")


def step_costs(path: str | os.PathLike, costs: Costs) -> None:
    """Milliseconds of a step by packed tokens, a panel a number of requests.

    A line a context; the step without a draft is the cross at as many tokens as
    requests.

    Raises:
      TypeError: costs that are not measured steps.
    """
    if not isinstance(costs.drafting, Grid):
        raise TypeError(
            f"`costs` must hold a Grid of steps, got {type(costs.drafting).__name__}"
        )
    planes = costs.drafting.planes
    with _figure(path, len(planes)) as axes:
        for axis, plane in zip(axes, planes, strict=True):
            for number, context in enumerate(plane.context_tokens):
                color = f"C{number}"
                label = f"{context // plane.requests} tokens each"
                milliseconds = 1e3 * plane.seconds(plane.packed_tokens, context)
                axis.plot(
                    plane.packed_tokens, milliseconds, "o-", ms=3,
                    color=color, label=label,
                )  # fmt: skip
                if costs.plain is not None:
                    plain = costs.plain_seconds(plane.requests, context)
                    axis.plot([plane.requests], [1e3 * plain], "x", color=color)
            axis.set_ylim(bottom=0)
            plural = "" if plane.requests == 1 else "s"
            axis.set_title(f"{plane.requests} request{plural}")
            axis.set_xlabel("packed tokens")
            axis.legend(fontsize=7)
        axes[0].set_ylabel("ms a step (x: without a draft)")


def throughput(path: str | os.PathLike, points: Sequence[Mapping[str, Any]]) -> None:
    """Throughput against speed for the user, a line a mode (Figure 7).

    Args:
      points: those of `dspark bench serve --json`; closed and open loads get a panel
        each.
    """
    loads = list(dict.fromkeys(point["load"] for point in points))
    with _figure(path, max(len(loads), 1), width=4.4) as axes:
        for axis, load in zip(axes, loads, strict=False):
            chosen = [point for point in points if point["load"] == load]
            modes = list(dict.fromkeys(mode for p in chosen for mode in p["modes"]))
            for mode in modes:
                found = [
                    (
                        point["modes"][mode]["user_tokens_per_second"],
                        point["modes"][mode]["tokens_per_second"],
                        point.get("concurrency", point.get("rate")),
                    )
                    for point in chosen
                    if mode in point["modes"]
                ]
                x, y, names = zip(*found, strict=True)
                axis.plot(x, y, marker="o", ms=4, label=mode)
                for place in zip(x, y, names, strict=True):
                    axis.annotate(f"{place[2]:g}", place[:2], fontsize=6)
            axis.set_xscale("log")
            axis.set_yscale("log")
            axis.set_title(f"{load} loop" if load == "closed" else "Poisson arrivals")
            axis.set_xlabel("tokens/s for a user")
        axes[0].set_ylabel("tokens/s of the engine")
        if points:
            _legend(axes[0])


def roofline(
    path: str | os.PathLike,
    rows: Iterable[Mapping[str, Any]],
    ceiling: Mapping[str, float],
) -> None:
    """FLOP/s over FLOPs a byte under the measured ceilings, a panel a variant.

    Args:
      rows: parts of `dspark bench round --json`, each with part, variant and batch.
      ceiling: copy_tb_per_s and matmul_tflops of the same run.
    """
    by_variant: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        by_variant.setdefault(row["variant"], []).append(row)
    names = list(dict.fromkeys(row["part"] for v in by_variant.values() for row in v))
    with _figure(path, max(len(by_variant), 1), width=4.4) as axes:
        for axis, (variant, found) in zip(axes, by_variant.items(), strict=False):
            for name in names:
                mine = [row for row in found if row["part"] == name and row["flops"]]
                x = [row["flops"] / row["bytes"] for row in mine]
                y = [row["flops"] / row["ms"] / 1e9 for row in mine]
                axis.plot(x, y, "o", ms=4, label=name)
                for place in zip(x, y, [row["batch"] for row in mine], strict=True):
                    axis.annotate(place[2], place[:2], fontsize=6)
            span = np.geomspace(0.1, 1e4, 200)
            roof = np.minimum(span * ceiling["copy_tb_per_s"], ceiling["matmul_tflops"])
            axis.plot(span, roof, color="black", lw=0.8)
            axis.set_xscale("log")
            axis.set_yscale("log")
            axis.set_title(variant, fontsize=8)
            axis.set_xlabel("FLOPs a byte")
        axes[0].set_ylabel("TFLOP/s")
        if by_variant:
            _legend(axes[0])


@contextlib.contextmanager
def _figure(
    path: str | os.PathLike, panels: int, width: float = _PANEL[0]
) -> Iterator[Any]:
    """Axes in one row; the figure is written to `path` when the block ends.

    Nothing global changes: no backend is chosen and no state of pyplot is touched.
    """
    check_installed()
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        size = (panels * width, _PANEL[1])
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


def _legend(axis: Any, handles: Sequence[Any] | None = None) -> None:
    """One legend for the whole figure, below it."""
    if handles is None:
        handles = axis.get_legend_handles_labels()[0]
    axis.figure.legend(
        handles=handles, loc="outside lower center", ncols=min(len(handles), 4)
    )


def _length(series: Mapping[str, Mapping[str, Acceptance]]) -> int:
    return max(len(found[ALL].conditional_acceptance) for found in series.values())


def _bars(value: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Bars for matplotlib: distances, never negative."""
    return np.maximum(np.stack([value - low, high - value]), 0)
