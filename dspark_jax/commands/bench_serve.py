"""The trials of `dspark bench serve`, and what is made of them.

One repeat of every load comes before the next repeat of any: what is left out when time
ends is left out everywhere, and a slow minute of the machine falls on all.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from dspark_jax import config
from dspark_jax.commands import bench, bench_engines, bench_models, failure
from dspark_jax.commands.bench_engines import Group
from dspark_jax.commands.bench_models import BenchModels
from dspark_jax.evaluation import paired, provenance
from dspark_jax.scheduling import calibration, cost_files, json_files
from dspark_jax.serving import loads

_FIXED = ("plain", "static")
_WAVES = 3  # requests of a trial for each that runs at once
_BUSY_HOST = 0.9  # share of the time from which on a hint is printed


class _Load:
    """One load: its requests, its engines, and the trials so far."""

    def __init__(
        self,
        kind: str,
        value: float,
        group: Group,
        jobs: list[loads.Job],
        arguments: argparse.Namespace,
    ):
        self.key = {kind: value}
        self.group = group
        self._is_closed = kind == "concurrency"
        self._value = value
        self._jobs = jobs
        self._arguments = arguments
        self._trials: dict[str, list[loads.Trial]] = {m: [] for m in arguments.modes}
        self._words: dict[str, list[list[int]]] = {}
        self.num_repeats = 0
        self.longest_seconds = 0.0  # of a repeat

    def run_repeat(self) -> None:
        """A trial of every mode; which comes first changes from repeat to repeat."""
        begin = time.perf_counter()
        modes = self._arguments.modes
        first = self.num_repeats % len(modes)
        for mode in modes[first:] + modes[:first]:
            engine = self.group.engines[mode]
            if self._is_closed:
                trial = loads.run_closed(engine, self._jobs, int(self._value))
            else:
                rng = np.random.default_rng((self._arguments.seed, self.num_repeats))
                trial = loads.run_open(engine, self._jobs, self._value, rng)
            self._trials[mode].append(trial)
            self._words[mode] = [handle.tokens for handle in trial.handles]
        self.num_repeats += 1
        seconds = time.perf_counter() - begin
        self.longest_seconds = max(self.longest_seconds, seconds)

    def report(self) -> dict[str, Any]:
        """The load's part of the result."""
        modes = {m: _of_mode(found, self._jobs) for m, found in self._trials.items()}
        reference = self._words[self._arguments.modes[0]]
        return {
            "load": "closed" if self._is_closed else "open",
            **self.key,
            "num_slots": self.group.num_slots,
            "num_requests": len(self._jobs),
            "num_repeats": self.num_repeats,
            "modes": modes,
            "num_equal_words": {
                mode: sum(map(list.__eq__, found, reference))
                for mode, found in self._words.items()
            },
            "ratios": _ratios(modes),
        }


class _Bench:
    """Runs the loads of one command; `result` is always ready to be saved."""

    def __init__(self, arguments: argparse.Namespace, models: BenchModels):
        self._arguments = arguments
        self._models = models
        self._begin = time.perf_counter()
        temperatures = None
        if arguments.sts is not None:
            temperatures = calibration.read(arguments.sts).temperatures
        costs = None if arguments.costs is None else cost_files.read(arguments.costs)
        self._has_costs = costs is not None
        self._groups = bench_engines.make_groups(arguments, models, costs, temperatures)
        self._loads = [self._load("concurrency", c) for c in arguments.concurrency]
        self._loads += [self._load("rate", rate) for rate in arguments.rates]
        self.result: dict[str, Any] = {
            "command": "bench serve",
            **provenance.of_machine(),
            **models.about,
            "dtype": arguments.dtype,
            "attention": arguments.attention,
            "rule": bench.rule_of(arguments),
            "temperature": arguments.temperature,
            "seed": arguments.seed,
            "max_new_tokens": arguments.max_new_tokens,
            "page_size": arguments.page_size,
            "chunk": arguments.chunk,
            "rounds_per_step": arguments.rounds_per_step,
            "modes": arguments.modes,
            "num_repeats": arguments.repeats,
            "time_limit": arguments.time_limit,
            "engines": [group.about for group in self._groups],
            "points": [],
            "is_complete": False,
        }
        self._take_stock()
        if costs is not None:
            about = bench_engines.differences(costs.info, self.result, arguments)
            self.result["costs"] = {
                "file": arguments.costs,
                "measured_otherwise": about,
            }
            if about:
                sys.stderr.write(
                    f"--costs: {arguments.costs} was measured otherwise: "
                    f"{', '.join(about)}\n"
                )

    def run(self) -> None:
        """Repeat after repeat of all loads, until all are done or time is up."""
        self.result["warm_up_seconds"] = bench_engines.compile_all(self._groups)
        self._say("compiled")
        if not self._has_costs:
            for group in self._groups:
                bench_engines.measure_costs(group)
            self._say("step costs measured")
        self.result["preparation_seconds"] = self._elapsed
        for repeat in range(self._arguments.repeats):
            for load in self._loads:
                if not self._has_time(load.longest_seconds):
                    self._say("time is up")
                    self.save()
                    return
                load.run_repeat()
                self._take_stock()
                self.save()
            self._say(f"repeat {repeat + 1} of {self._arguments.repeats}")
        self.save()

    def save(self) -> None:
        """Writes the result as it stands."""
        self.result["seconds"] = self._elapsed
        if self._arguments.output is not None:
            json_files.write(self._arguments.output, self.result)

    @property
    def _elapsed(self) -> float:
        return time.perf_counter() - self._begin

    def _has_time(self, seconds: float) -> bool:
        limit = self._arguments.time_limit
        return limit is None or self._elapsed + seconds <= limit

    def _take_stock(self) -> None:
        """The points of all loads, and what is missing of them."""
        asked = self._arguments.repeats
        self.result["points"] = [x.report() for x in self._loads if x.num_repeats]
        self.result["left_out"] = [
            x.key | {"num_repeats": asked - x.num_repeats}
            for x in self._loads
            if x.num_repeats < asked
        ]
        self.result["is_complete"] = not self.result["left_out"]

    def _load(self, kind: str, value: float) -> _Load:
        given, is_closed = self._arguments, kind == "concurrency"
        group = next(
            group
            for group in self._groups
            if (group.sizes is None) is not is_closed
            and (group.sizes is None or value in group.sizes)
        )
        at_once = int(value) if is_closed else given.slots
        count = given.requests or max(_WAVES * at_once, 8)
        return _Load(kind, value, group, self._models.jobs(given, count), given)

    def _say(self, line: str) -> None:
        sys.stderr.write(f"{line}, {self._elapsed:.0f} s\n")
        sys.stderr.flush()


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Runs the command's loads and returns its JSON."""
    modes = list(dict.fromkeys(arguments.modes))
    if "cap-accept" in modes and "compact" not in modes and arguments.costs is None:
        raise failure.Failure("--modes cap-accept needs compact beside it, or --costs")
    arguments.modes = sorted(modes, key=config.MODES.index)
    arguments.concurrency = list(dict.fromkeys(arguments.concurrency))
    arguments.rates = list(dict.fromkeys(arguments.rates))
    models = bench_models.load(arguments)
    with failure.of_input():
        runs = _Bench(arguments, models)
        runs.run()
    return runs.result


def print_table(result: dict[str, Any]) -> None:
    """The result for a person."""
    import rich.table

    from dspark_jax.commands import terminal

    title = f"serving {result['target']}, {result['device']}"
    if result["is_replayed"]:
        title += ", acceptance replayed"
    table = rich.table.Table(title=title)
    names = ("load", "mode", "tokens/s", "per user", "τ", "window", "host %", "ratio")
    for name in names:
        table.add_column(name, justify="left" if name == "mode" else "right")
    for point in result["points"]:
        load = point.get("concurrency", point.get("rate"))
        for mode, found in point["modes"].items():
            ratio = point.get("ratios", {}).get(mode)
            shown = "-"
            if ratio is not None:
                shown = f"{ratio['mean']:.2f}"
                if ratio["low"] is not None:
                    shown += f" ({ratio['low']:.2f}–{ratio['high']:.2f})"
            table.add_row(
                f"{load:g}",
                mode,
                f"{found['tokens_per_second']:.1f}",
                f"{found['user_tokens_per_second']:.1f}",
                _number(found["accepted_length"]),
                _number(found["mean_verify_length"]),
                f"{100 * found['host_share']:.0f}",
                shown,
            )
    terminal.print_result(
        table, "ratio: to the better of plain and static, with its 95 % interval"
    )
    if (hint := _hint(result)) is not None:
        terminal.print_result(hint)


def _hint(result: dict[str, Any]) -> str | None:
    """What to try where the host is what takes the time."""
    is_busy = any(
        found["host_share"] >= _BUSY_HOST
        for point in result["points"]
        for found in point["modes"].values()
    )
    if not is_busy:
        return None
    return (
        f"host % of {100 * _BUSY_HOST:.0f} and more: the device waits for the host. "
        "More rounds a call spare it: "
        f"--rounds-per-step {4 * result['rounds_per_step']}"
    )


def _of_mode(
    trials: Sequence[loads.Trial], jobs: Sequence[loads.Job]
) -> dict[str, Any]:
    last = trials[-1].metrics
    speeds = [trial.tokens_per_second for trial in trials]
    users = [trial.user_tokens_per_second for trial in trials]
    handles = [handle for trial in trials for handle in trial.handles]
    waits = [h.first_token_at - h.submitted_at for h in handles if h.first_token_at]
    whole = [h.finished_at - h.submitted_at for h in handles if h.finished_at]
    return {
        "tokens_per_second": float(np.median(speeds)),
        "user_tokens_per_second": float(np.median(users)),
        "tokens_per_second_of_trials": speeds,
        "user_tokens_per_second_of_trials": users,
        "first_token_seconds": _quantiles(waits),
        "request_seconds": _quantiles(whole),
        "accepted_length": last["accepted_length"],
        "mean_verify_length": last["mean_verify_length"],
        "host_share": float(np.median([t.metrics["host_share"] for t in trials])),
        "starved_share": float(np.median([t.metrics["starved_share"] for t in trials])),
        "domains": _domains(trials, jobs),
        "metrics_of_last_trial": last,
    }


def _domains(
    trials: Sequence[loads.Trial], jobs: Sequence[loads.Job]
) -> dict[str, dict[str, Any]]:
    """Mean window and τ by domain, over all trials."""
    found = {}
    for domain in dict.fromkeys(job.domain for job in jobs):
        handles = [
            handle
            for trial in trials
            for job, handle in zip(jobs, trial.handles, strict=True)
            if job.domain == domain
        ]
        rounds = sum(handle.num_rounds for handle in handles)
        if rounds:
            found[domain] = {
                "num_rounds": rounds,
                "mean_verify_length": sum(h.num_verified for h in handles) / rounds,
                "accepted_length": sum(h.accepted_sum for h in handles) / rounds,
            }
    return found


def _ratios(modes: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Each metered mode over the better of plain and static, trial by trial."""
    rivals = [mode for mode in _FIXED if mode in modes]
    if not rivals:
        return {}
    best = max(rivals, key=lambda mode: modes[mode]["tokens_per_second"])
    theirs = modes[best]["tokens_per_second_of_trials"]
    return {
        mode: {"to": best}
        | paired.ratio(found["tokens_per_second_of_trials"], theirs)._asdict()
        for mode, found in modes.items()
        if mode != best
    }


def _quantiles(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    return {f"p{q}": float(np.percentile(values, q)) for q in (50, 95)}


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
