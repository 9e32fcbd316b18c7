"""`python -m pallas_kernels.bench`: times the kernels and their peers on this device.

Every figure is a median over repetitions of chained calls: the output of a call is the
query of the next, and the calls go through several caches which together exceed the
second-level cache, so that keys come from memory and helper kernels and launch gaps
count. A ceiling, the speed of a plain copy, is measured in the same run; a fraction is
(bytes of the keys and values that are seen / ceiling) / median.
"""

import argparse
import dataclasses
import datetime
import importlib.metadata
import importlib.util
import itertools
import json
import os
import pathlib
import platform
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import bench_check, bench_peers, cases
from pallas_kernels.cached_attention import tuning

FLUSH = 130e6  # bytes of caches in rotation: twice the second-level cache of an H200
OURS = ("mosaic_gpu", "triton", "mosaic_tpu", "xla")
CONFIGS = {"mosaic_gpu": tuning.MosaicGpuConfig, "triton": tuning.TritonConfig}


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds a call."""

    median: float
    least: float
    most: float


def main(argv: Sequence[str] | None = None) -> int:
    """Runs what the arguments ask for; 0 if every implementation ran and was right."""
    # torch needs memory too.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    arguments = _parser().parse_args(argv)
    deadline = time.monotonic() + arguments.limit_seconds
    report: dict[str, Any] = {"date": datetime.date.today().isoformat(), **_machine()}
    if arguments.check:
        names = _listed(arguments.implementations, OURS, "--implementations")
        chosen = _chosen((*cases.SMALL, *cases.FLOAT32), arguments.cases)
        report["checks"] = []
        for row in bench_check.checks(names, chosen, deadline):
            _say(json.dumps(row))
            report["checks"].append(row)
    else:
        report["ceiling"] = _ceiling()
        _say(f"ceiling {report['ceiling']}")
        report["results"] = list(_results(arguments, report["ceiling"], deadline))
    if arguments.out is not None:
        _write(arguments.out, report)
    sys.stdout.write(json.dumps(report) + "\n")
    rows = report.get("checks", report.get("results", []))
    return 1 if any("error" in row or row.get("is_wrong") for row in rows) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pallas_kernels.bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="""examples:
  python -m pallas_kernels.bench --check
  python -m pallas_kernels.bench --cases 'block 64x' --peers torch,cudnn --out b.json
  python -m pallas_kernels.bench --cases 'block 8x8192' --implementations mosaic_gpu \\
      --config max_parts=2,4,6 stages=4,5
""",
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
        default="mosaic_gpu,xla",
        help=f"of {', '.join(OURS)}; default: mosaic_gpu,xla",
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


# Time.


def _results(
    arguments: Any, ceiling: dict[str, float], deadline: float
) -> Iterator[dict[str, Any]]:
    names = _listed(arguments.implementations, OURS, "--implementations")
    peers = _listed(arguments.peers, tuple(bench_peers.PEERS), "--peers")
    rows = []
    for case in _chosen(cases.BENCH, arguments.cases):
        jobs: list[tuple[str, Any]] = [
            (name, config)
            for name in names
            for config in _sweep(name, arguments.config)
        ]
        jobs += [(peer, None) for peer in peers]
        buffers = None
        for name, config in jobs:
            if time.monotonic() > deadline:
                break
            if buffers is None:
                buffers = _buffers(case)
            row: dict[str, Any] = {"case": case.name, "implementation": name}
            row |= {"config": _config_json(config), **_work(case)}
            started = time.monotonic()
            try:
                timing, error = _time(case, buffers, name, config, arguments)
            except NotImplementedError as refusal:
                row["refused"] = str(refusal)
            except bench_check.FAILURES:
                row["error"] = traceback.format_exc()[-3000:]
            else:
                row |= _figures(row, timing, ceiling)
                row["relative_error"] = error
                row["is_wrong"] = error is not None and not error <= 2e-2
            row["took_s"] = round(time.monotonic() - started, 2)
            _say(json.dumps(row))
            rows.append(row)
            yield row
    if arguments.plot is not None:
        _plot(arguments.plot, rows, ceiling)


def _sweep(name: str, fields: Sequence[str]) -> list[Any]:
    if not fields or name not in CONFIGS:
        return [None]
    names, values = [], []
    for field in fields:
        key, _, numbers = field.partition("=")
        names.append(key)
        values.append([int(number) for number in numbers.split(",")])
    return [
        CONFIGS[name](**dict(zip(names, combination, strict=True)))
        for combination in itertools.product(*values)
    ]


def _buffers(case: cases.CachedCase) -> list[cases.CachedInputs]:
    first = cases.cached_inputs(case, draw=cases.drawn_on_device)
    size = 2 * first.keys.size * first.keys.dtype.itemsize
    count = int(min(max(-(-FLUSH // size), 2), 16))
    more = [
        dataclasses.replace(
            first, keys=jnp.copy(first.keys), values=jnp.copy(first.values)
        )
        for _ in range(count - 1)
    ]
    jax.block_until_ready([(one.keys, one.values) for one in more])
    return [first, *more]


def _time(
    case: cases.CachedCase,
    buffers: list[cases.CachedInputs],
    name: str,
    config: Any,
    arguments: Any,
) -> tuple[Timing, float | None]:
    if name in bench_peers.TORCH:
        seconds = bench_peers.TORCH[name](case, len(buffers), arguments.repetitions)
        return _timing(seconds), None
    if name in bench_peers.PEERS:
        call = bench_peers.PEERS[name](case, buffers[0])
    else:
        call = bench_check.call_of(case, buffers[0], implementation=name, config=config)

    @jax.jit
    def chain(query: jax.Array, stored: list[tuple[jax.Array, jax.Array]]) -> jax.Array:
        for keys, values in stored:
            query = call(query, keys, values)
        return query

    stored = [(one.keys, one.values) for one in buffers]
    query = buffers[0].query
    out = jax.block_until_ready(jax.jit(call)(query, *stored[0]))
    reference = bench_check.call_of(case, buffers[0], implementation="xla", config=None)
    error = bench_check.relative_error(out, jax.jit(reference)(query, *stored[0]))
    run = chain.lower(query, stored).compile()
    query = jax.block_until_ready(run(query, stored))
    started = time.perf_counter()
    query = jax.block_until_ready(run(query, stored))
    count = int(min(max(0.02 / (time.perf_counter() - started), 3), 400))
    seconds = []
    for _ in range(arguments.repetitions):
        started = time.perf_counter()
        for _ in range(count):
            query = run(query, stored)
        jax.block_until_ready(query)
        elapsed = time.perf_counter() - started
        seconds.append(elapsed / count / len(stored))
    return _timing(seconds), error


def _timing(seconds: Sequence[float]) -> Timing:
    return Timing(statistics.median(seconds), min(seconds), max(seconds))


def _work(case: cases.CachedCase) -> dict[str, float]:
    rows = (
        case.rows if isinstance(case.rows, tuple) else (case.rows,) * len(case.lengths)
    )
    size = jnp.dtype(case.dtype).itemsize
    read = [n if case.window is None else min(n, case.window) for n in case.lengths]
    pairs = sum(n * count for n, count in zip(read, rows, strict=True))
    return {
        "bytes": 2 * sum(read) * case.kv_heads * case.width * size,
        "flops": 4 * pairs * case.heads * case.width,
    }


def _figures(
    row: dict[str, Any], timing: Timing, ceiling: dict[str, float]
) -> dict[str, Any]:
    floor = row["bytes"] / (ceiling["copy_tb_per_s"] * 1e12)
    return {
        "median_us": round(timing.median * 1e6, 2),
        "least_us": round(timing.least * 1e6, 2),
        "most_us": round(timing.most * 1e6, 2),
        "floor_us": round(floor * 1e6, 2),
        "fraction": round(floor / timing.median, 4),
        "tflops": round(row["flops"] / timing.median / 1e12, 2),
    }


def _ceiling() -> dict[str, float]:
    """Copy (read and write) and matmul, the best of several runs."""
    elements = 2**28 if jax.default_backend() == "gpu" else 2**22
    source = jnp.zeros((elements,), jnp.uint32)
    copy = jax.jit(lambda x: x ^ jnp.uint32(1), donate_argnums=())
    seconds = _best(lambda: copy(source))
    rates = [2 * source.nbytes / seconds / 1e12]
    if (torch_rate := bench_peers.torch_copy_rate()) is not None:
        rates.append(torch_rate)
    del source
    side = 8192 if jax.default_backend() == "gpu" else 256
    matrix = jnp.ones((side, side), jnp.bfloat16)
    multiply = jax.jit(lambda a: a @ a)
    rate = 2 * side**3 / _best(lambda: multiply(matrix)) / 1e12
    return {"copy_tb_per_s": round(max(rates), 3), "matmul_tflops": round(rate, 1)}


def _best(function: Callable[[], Any], count: int = 10) -> float:
    jax.block_until_ready(function())
    found = []
    for _ in range(5):
        started = time.perf_counter()
        for _ in range(count):
            out = function()
        jax.block_until_ready(out)
        found.append((time.perf_counter() - started) / count)
    return min(found)


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


def _config_json(config: Any) -> dict[str, Any] | None:
    return None if config is None else dataclasses.asdict(config)


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
