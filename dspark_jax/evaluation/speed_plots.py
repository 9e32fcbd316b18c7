"""Figures of what steps cost and what an engine makes of them, as PNG files.

Step costs, throughput by load (the paper's Figure 7), and the roofline of a round.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from dspark_jax.evaluation import figures
from dspark_jax.scheduling.costs import Costs, Grid


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
    with figures.figure(path, len(planes)) as axes:
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
    with figures.figure(path, max(len(loads), 1), width=4.4) as axes:
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
            figures.legend(axes[0])


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
    with figures.figure(path, max(len(by_variant), 1), width=4.4) as axes:
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
            figures.legend(axes[0])
