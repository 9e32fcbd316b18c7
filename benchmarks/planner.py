"""Host time of planning one step: 128 requests, 15 positions, a dozen buckets.

python benchmarks/planner.py

Times what an engine does between two steps: reading the relay, the costs of the buckets
and the budget; Algorithm 1 on as many live confidences beside it. No device is used.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from common import log, save

from dspark_jax.scheduling import budgets, costs, planner
from dspark_jax.scheduling.costs import Costs, Grid, Plane
from dspark_jax.scheduling.online_costs import OnlineCosts
from dspark_jax.scheduling.relay import ConfidenceRelay

BUCKETS = (128, 192, 256, 320, 384, 512, 640, 768, 1024, 1280, 1536, 2048)
LIMIT_SECONDS = 1e-3


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--positions", type=int, default=15)
    parser.add_argument("--repeats", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output")
    options = parser.parse_args()
    # `common.save` names these of every benchmark.
    options.target, options.drafter = "none", "none"
    tables: list[dict[str, Any]] = [
        {"operation": name, **measure(call, options.repeats)}
        for name, call in operations(options).items()
    ]
    for table in tables:
        log(table)
    (step,) = [t for t in tables if t["operation"] == "relay + costs + budget"]
    results = {
        "buckets": list(BUCKETS),
        "limit_seconds": LIMIT_SECONDS,
        "is_within_limit": step["median_seconds"] < LIMIT_SECONDS,
        "tables": tables,
    }
    save("planner_cpu", options, results)


def operations(options: argparse.Namespace) -> dict[str, Callable[[], Any]]:
    """The parts, and what an engine's host does each step."""
    random = np.random.default_rng(options.seed)
    requests, length = options.requests, options.positions
    confidence = random.beta(6, 2, (requests, length))
    relay = ConfidenceRelay(requests, length)
    slots = list(range(requests))
    for slot in slots:
        relay.assign(slot)
    table = OnlineCosts(Costs(drafting=grid(), plain=grid(), info={}))
    for size in BUCKETS:
        table.update(requests, size, 100_000, 0.01 + size * 1e-5)
    step = 0

    def whole_step():
        nonlocal step
        step += 1
        relay.publish(step, slots, confidence)
        past = relay.read(step + 1, slots)
        return budgets.budget(
            past,
            step=step + 1,
            buckets=BUCKETS,
            seconds=table.seconds(requests, BUCKETS, 100_000),
            plain_seconds=table.plain_seconds(requests, 100_000),
        )

    whole_step(), whole_step()
    past = relay.read(step + 2, slots)
    seconds = table.seconds(requests, BUCKETS, 100_000)
    curve = costs.curve(table.costs, requests, length, 100_000, buckets=BUCKETS)
    survival = planner.survival(confidence)
    return {
        "relay + costs + budget": whole_step,
        "budget": lambda: budgets.budget(
            past, step=step + 2, buckets=BUCKETS, seconds=seconds, plain_seconds=0.01
        ),
        "costs": lambda: table.seconds(requests, BUCKETS, 100_000),
        "plan": lambda: planner.plan(confidence, curve),
        "allocate": lambda: planner.allocate(survival, 512),
    }


def grid() -> Grid:
    """A table of the size that an engine with a dozen programs has."""
    contexts = (0, 16_384, 65_536, 262_144)
    return Grid(
        planes=tuple(
            Plane(
                requests=requests,
                packed_tokens=tuple(size for size in BUCKETS if size >= requests),
                context_tokens=contexts,
                step_seconds=tuple(
                    tuple(0.01 + size * 1e-5 + context * 1e-8 for context in contexts)
                    for size in BUCKETS
                    if size >= requests
                ),
            )
            for requests in (1, 16, 64, 128, 256)
        )
    )


def measure(call: Callable[[], Any], repeats: int) -> dict[str, float]:
    """Median and spread of a call's seconds."""
    for _ in range(20):
        call()
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
    low, median, high = np.percentile(seconds, [10, 50, 90])
    return {
        "median_seconds": float(median),
        "p10_seconds": float(low),
        "p90_seconds": float(high),
        "repeats": repeats,
    }


if __name__ == "__main__":
    main()
