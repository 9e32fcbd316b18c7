"""Figures of what a drafter is worth, as PNG files.

They show what the JSON holds: conditional acceptance by slot (the paper's Figure 2), τ
by domain, τ by depth and by block size (3, 4), threshold curves (5), and reliability
diagrams (6).
"""

import os
from collections.abc import Mapping, Sequence

import numpy as np

from dspark_jax.evaluation import figures
from dspark_jax.evaluation.acceptance import Acceptance, Window
from dspark_jax.evaluation.prompts import ALL
from dspark_jax.evaluation.reliability import Reliability


def conditional_acceptance(
    path: str | os.PathLike, series: Mapping[str, Mapping[str, Acceptance]]
) -> None:
    """Conditional acceptance by slot, a panel a domain, a line a drafter (Figure 2).

    Args:
      series: drafter -> domain -> Acceptance; bars are the intervals.
    """
    domains = list(next(iter(series.values())))
    with figures.figure(path, len(domains)) as axes:
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
        figures.legend(axes[0])


def accepted_length(
    path: str | os.PathLike, series: Mapping[str, Mapping[str, Acceptance]]
) -> None:
    """τ by domain, a bar a drafter, with its interval over prompts."""
    domains = list(next(iter(series.values())))
    with figures.figure(path, 1, width=max(4.0, 1.1 * len(domains) + 1.5)) as (axis,):
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
        figures.legend(axis)


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
    with figures.figure(path, len(domains)) as axes:
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
                sizes = [size for size, _ in chosen]
                # Two of one size differ in something else: no line goes through them.
                is_line = len(set(sizes)) == len(sizes)
                axis.errorbar(
                    sizes, y, yerr=_bars(y, low, high), label=name,
                    marker="o", ms=4, capsize=2, linestyle="-" if is_line else "none",
                )  # fmt: skip
            axis.set_title(domain)
            axis.set_xlabel(label)
        axes[0].set_ylabel("accepted length τ")
        figures.legend(axes[0])


def thresholds(path: str | os.PathLike, series: Mapping[str, Sequence[Window]]) -> None:
    """Tokens a round (bars) and their accepted share (line) by threshold (Figure 5).

    The paper's acceptance rate: (accepted + bonus) / (verified + 1).
    """
    with figures.figure(path, len(series), width=4.2) as axes:
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
                label="accepted share, bonus included",
            )  # fmt: skip
            rate.set_ylim(0, 1.02)
            rate.set_ylabel("accepted share, bonus included", color="C3")
        bars = axes[0].get_legend_handles_labels()[0]
        figures.legend(axes[0], [*bars, *rate.get_lines()])


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
    with figures.figure(path, len(slots)) as axes:
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


def _length(series: Mapping[str, Mapping[str, Acceptance]]) -> int:
    return max(len(found[ALL].conditional_acceptance) for found in series.values())


def _bars(value: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Bars for matplotlib: distances, never negative."""
    return np.maximum(np.stack([value - low, high - value]), 0)
