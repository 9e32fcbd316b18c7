"""`python -m pallas_kernels.bench`: times the kernels and their peers on this device.

Every figure is a median over repetitions of chained calls. The ceilings (a plain copy,
a large matmul) are measured in the same run; a fraction is (bytes of the keys and
values that are seen / copy ceiling) / median.
"""

import argparse
import datetime
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from pallas_kernels import (
    bench_anchor,
    bench_cached,
    bench_check,
    bench_peers,
    bench_timing,
    cases,
)

OURS = ("mosaic_gpu", "triton", "mosaic_tpu", "xla")
ANCHOR = ("mosaic_gpu", "cudnn", "xla")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs what the arguments ask for; 0 if every implementation ran and was right."""
    # torch needs memory too.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    arguments = _parser().parse_args(argv)
    deadline = time.monotonic() + arguments.limit_seconds
    report: dict[str, Any] = {"date": datetime.date.today().isoformat(), **_machine()}
    rows = []
    for row in _rows(arguments, report, deadline):
        _say(json.dumps(row))
        rows.append(row)
        if arguments.out is not None:  # a run that is cut off leaves what it has
            _write(arguments.out, report | {"results": rows})
    report["results"] = rows
    if arguments.plot is not None and arguments.op == "cached" and not arguments.check:
        _plot(arguments.plot, rows, report["ceiling"])
    if arguments.out is not None:
        _write(arguments.out, report)
    sys.stdout.write(json.dumps(report) + "\n")
    return 1 if any("error" in row or row.get("is_wrong") for row in rows) else 0


def _rows(
    arguments: Any, report: dict[str, Any], deadline: float
) -> Iterator[dict[str, Any]]:
    if arguments.op == "anchor":
        names = _listed(arguments.implementations, ANCHOR, "--implementations")
        if arguments.check:
            chosen = _chosen((*cases.ANCHOR_SMALL, *cases.ANCHOR), arguments.cases)
            return bench_anchor.checks(names, chosen, deadline)
        peers = _listed(arguments.peers, tuple(bench_anchor.PEERS), "--peers")
        chosen = _chosen(cases.ANCHOR, arguments.cases)
        return bench_anchor.results(arguments, names, peers, chosen, deadline)
    names = _listed(arguments.implementations, OURS, "--implementations")
    if arguments.check:
        chosen = _chosen((*cases.SMALL, *cases.FLOAT32), arguments.cases)
        return bench_check.checks(names, chosen, deadline)
    peers = _listed(arguments.peers, tuple(bench_peers.PEERS), "--peers")
    report["ceiling"] = bench_timing.ceiling()
    _say(f"ceiling {report['ceiling']}")
    chosen = _chosen(cases.BENCH, arguments.cases)
    return bench_cached.results(
        arguments, names, peers, chosen, report["ceiling"], deadline
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pallas_kernels.bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="""examples:
  python -m pallas_kernels.bench --check --implementations mosaic_gpu
  python -m pallas_kernels.bench --cases 'block 64x' --implementations mosaic_gpu \\
      --peers torch_cudnn,cudnn --out b.json
  python -m pallas_kernels.bench --op anchor --implementations mosaic_gpu,cudnn \\
      --config anchors=32,64 key_tile=64,128 --peers torch_flex
  python -m pallas_kernels.bench --cases 'block 8x8192' --implementations mosaic_gpu \\
      --config max_parts=2,4,6 stages=4,5
""",
    )
    parser.add_argument(
        "--op",
        choices=("cached", "anchor"),
        default="cached",
        help="cached_attention (default) or anchor_attention, forward and backward",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="compare with the definition on the small cases instead of timing",
    )
    parser.add_argument(
        "--cases", default="", help="substrings, comma-separated; default: every case"
    )
    parser.add_argument(
        "--implementations",
        default="xla",
        help=f"of {', '.join(OURS)}; for anchor_attention of {', '.join(ANCHOR)}; "
        "default: xla",
    )
    parser.add_argument(
        "--peers",
        default="",
        help=f"of {', '.join(bench_peers.PEERS)}; default: none",
    )
    parser.add_argument(
        "--config",
        nargs="+",
        default=[],
        metavar="FIELD=V,V",
        help="settings to sweep, all combinations; default: the table's",
    )
    parser.add_argument(
        "--kernels",
        action="store_true",
        help="also what each kernel of a call takes by itself, by CUPTI",
    )
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument(
        "--limit-seconds",
        type=float,
        default=float("inf"),
        help="start nothing new after this many seconds",
    )
    parser.add_argument("--out", type=pathlib.Path, help="also write the JSON there")
    parser.add_argument(
        "--plot", type=pathlib.Path, help="draw a roofline there (needs matplotlib)"
    )
    return parser


def _chosen(found: Sequence[Any], wanted: str) -> list[Any]:
    parts = [part.strip() for part in wanted.split(",") if part.strip()]
    return [c for c in found if not parts or any(part in c.name for part in parts)]


def _listed(text: str, known: Sequence[str], option: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise SystemExit(f"{option}: must be of {', '.join(known)}, got {name}")
    return names


# Reports.


def _machine() -> dict[str, Any]:
    versions = {"python": platform.python_version()}
    for package in (
        "jax",
        "jaxlib",
        "jax-cuda13-plugin",
        "torch",
        "triton",
        "jax-triton",
    ):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    device = jax.devices()[0]
    return {"device": device.device_kind, "platform": device.platform} | {
        "versions": versions
    }


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def _write(path: pathlib.Path, report: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(report, indent=1) + "\n")
    os.replace(part, path)


def _plot(path: pathlib.Path, rows: list[dict[str, Any]], ceiling: Any) -> None:
    """TFLOP/s over FLOPs a byte, under the two ceilings."""
    if importlib.util.find_spec("matplotlib") is None:
        _say("no plot: matplotlib is not installed")
        return
    import matplotlib.figure

    figure = matplotlib.figure.Figure(figsize=(7, 5), layout="constrained")
    axes = figure.subplots()
    intensity = np.geomspace(1, 1e4, 200)
    roof = np.minimum(intensity * ceiling["copy_tb_per_s"], ceiling["matmul_tflops"])
    axes.loglog(intensity, roof, color="black", label="copy and matmul ceilings")
    timed = [row for row in rows if "tflops" in row]
    for name in dict.fromkeys(row["implementation"] for row in timed):
        mine = [row for row in timed if row["implementation"] == name]
        x = [row["flops"] / row["bytes"] for row in mine]
        axes.loglog(x, [row["tflops"] for row in mine], "o", label=name, alpha=0.7)
    axes.set_xlabel("FLOPs a byte of keys and values")
    axes.set_ylabel("TFLOP/s")
    axes.legend()
    figure.savefig(path)


if __name__ == "__main__":
    sys.exit(main())
