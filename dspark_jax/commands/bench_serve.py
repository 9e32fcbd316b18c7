"""The trials of `dspark bench serve`, and what is made of them."""

import argparse
import concurrent.futures
import gc
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from dspark_jax import config
from dspark_jax.commands import bench, bench_models, failure, unpriced
from dspark_jax.commands.bench_models import BenchModels
from dspark_jax.evaluation import paired, provenance
from dspark_jax.scheduling import calibration, cost_files, json_files
from dspark_jax.scheduling.costs import Costs
from dspark_jax.scheduling.online_costs import OnlineCosts
from dspark_jax.serving import Bucket, Engine, EngineConfig, loads, profile

_FIXED = ("plain", "static")
_METERED = ("compact", "cap-accept")
_MEASURED_STEPS, _MEASURED_REPEATS = 4, 3


class _Bench:
    """Runs the loads of one command; `result` is always ready to be saved."""

    def __init__(self, arguments: argparse.Namespace, models: BenchModels):
        self._arguments = arguments
        self._models = models
        self._begin = time.perf_counter()
        self._temperatures = None
        if arguments.sts is not None:
            self._temperatures = calibration.read(arguments.sts).temperatures
        self._costs = (
            None if arguments.costs is None else cost_files.read(arguments.costs)
        )
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
            "rounds_per_step": arguments.rounds_per_step,
            "modes": arguments.modes,
            "points": [],
            "is_complete": False,
        }

    def run(self) -> None:
        """All loads, each with its share of the time that is left."""
        given = self._arguments
        points = [("concurrency", c) for c in given.concurrency]
        points += [("rate", rate) for rate in given.rates]
        for number, (kind, value) in enumerate(points):
            until = None
            if given.time_limit is not None:
                left = given.time_limit - self._elapsed
                if left <= 0:
                    self._say("time is up")
                    return
                until = self._elapsed + left / (len(points) - number)
            self._run_point(kind, value, until)
        self.result["is_complete"] = True
        self.save()

    def save(self) -> None:
        self.result["seconds"] = self._elapsed
        if self._arguments.output is not None:
            json_files.write(self._arguments.output, self.result)

    @property
    def _elapsed(self) -> float:
        return time.perf_counter() - self._begin

    def _run_point(self, kind: str, value: float, until: float | None) -> None:
        given = self._arguments
        slots = int(value) if kind == "concurrency" else given.slots
        point: dict[str, Any] = {"load": "closed" if kind == "concurrency" else "open"}
        point |= {kind: value, "num_slots": slots, "modes": {}}
        self.result["points"].append(point)
        jobs = self._models.jobs(given, given.requests or max(2 * slots, 8))
        point["num_requests"] = len(jobs)
        engines = self._engines(slots, is_open=kind == "rate", point=point)
        self._say(f"{kind} {value:g}: compiled, {self._elapsed:.0f} s")
        trials: dict[str, list[loads.Trial]] = {mode: [] for mode in given.modes}
        words: dict[str, list[list[int]]] = {}
        for repeat in range(given.repeats):
            order = given.modes[repeat % len(given.modes) :]
            order += given.modes[: repeat % len(given.modes)]
            for mode in order:
                if kind == "concurrency":
                    trial = loads.run_closed(engines[mode], jobs)
                else:
                    rng = np.random.default_rng((given.seed, repeat))
                    trial = loads.run_open(engines[mode], jobs, value, rng)
                trials[mode].append(trial)
                words[mode] = [handle.tokens for handle in trial.handles]
            point["num_repeats"] = repeat + 1
            point["modes"] = {
                mode: _of_mode(found, jobs) for mode, found in trials.items()
            }
            point["num_equal_words"] = {
                mode: sum(map(list.__eq__, found, words[given.modes[0]]))
                for mode, found in words.items()
            }
            point["ratios"] = _ratios(point["modes"])
            self.save()
            if until is not None and self._elapsed > until and repeat > 0:
                break
        self._say(f"{kind} {value:g}: {point['num_repeats']} repeats")
        del engines
        gc.collect()  # The next load's pools need the memory.

    def _engines(
        self, slots: int, *, is_open: bool, point: dict[str, Any]
    ) -> dict[str, Engine]:
        """Warm engines by mode; those that are metered have their costs."""
        modes = self._arguments.modes

        def make(mode: str) -> Engine:
            return self._engine(mode, slots, is_open=is_open, costs=self._costs)

        with unpriced.engines():
            engines = {mode: make(mode) for mode in modes}
        # Compiling is most of it, and much of that runs beside Python.
        with concurrent.futures.ThreadPoolExecutor(len(modes)) as pool:
            seconds = list(pool.map(Engine.warm_up, engines.values()))
        point["warm_up_seconds"] = dict(zip(modes, seconds, strict=True))
        point["num_programs"] = {m: e.num_programs for m, e in engines.items()}
        if self._costs is None and "compact" in engines:
            engine = engines["compact"]
            most = engine.max_measured_context(_MEASURED_STEPS)
            measured = profile.measure_steps(
                engine,
                sorted({max(most // 4, 1), most}),
                num_steps=_MEASURED_STEPS,
                repeats=_MEASURED_REPEATS,
            )
            costs = profile.make_costs(measured, {}, is_fastest=True)
            point["step_costs"] = [step._asdict() for step in measured]
            del engine
            for mode in set(_METERED) & set(engines):
                del engines[mode]  # frees its pools before the next are made
                engines[mode] = self._engine(mode, slots, is_open=is_open, costs=costs)
        return engines

    def _engine(
        self, mode: str, slots: int, *, is_open: bool, costs: Costs | None
    ) -> Engine:
        given, models = self._arguments, self._models
        length = given.draft_length or models.drafter.config.block_size
        longest = models.longest_prompt + given.max_new_tokens
        # Room to measure steps at the longest context, too.
        longest += _MEASURED_STEPS * given.rounds_per_step * (1 + length)
        settings = EngineConfig(
            mode=mode,  # type: ignore[arg-type]
            num_slots=slots,
            max_length=min(longest, models.target.config.max_position + 1),
            page_size=given.page_size,
            rule=bench.rule_of(given),  # type: ignore[arg-type]
            draft_length=given.draft_length,
            candidates=given.candidates,
            buckets=None if is_open else _buckets(mode, slots, length),
            chunk=given.chunk,
            prefill_groups=max(1, min(slots // 4, 16)),
            sampling_fields=("temperature",) if given.temperature > 0 else (),
            max_stop_tokens=max(len(models.stop_tokens), 1),
            rounds_per_step=given.rounds_per_step,
        )
        if mode == "plain":
            return Engine(models.target, models.target_params, config=settings)
        follows = OnlineCosts(costs) if costs is not None and mode in _METERED else None
        return Engine(
            models.target,
            models.target_params,
            models.drafter,
            models.drafter_params,
            config=settings,
            costs=follows,
            temperatures=self._temperatures,
        )

    def _say(self, line: str) -> None:
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Runs the command's loads and returns its JSON."""
    modes = list(dict.fromkeys(arguments.modes))
    if "cap-accept" in modes and "compact" not in modes and arguments.costs is None:
        raise failure.Failure("--modes cap-accept needs compact beside it, or --costs")
    arguments.modes = sorted(modes, key=config.MODES.index)
    models = bench_models.load(arguments)
    with failure.of_input():
        runs = _Bench(arguments, models)
        runs.run()
    return runs.result


def print_table(result: dict[str, Any]) -> None:
    """The result for a person."""
    import rich.console
    import rich.table

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
    console = rich.console.Console(highlight=False)
    console.print(table)
    console.print("ratio: to the better of plain and static, with its 95 % interval")


def _buckets(mode: str, slots: int, length: int) -> tuple[Bucket, ...]:
    """The shapes of a closed loop: its requests are always as many."""
    full = slots * (1 + length)
    if mode == "plain":
        return (Bucket(slots, slots),)
    if mode != "compact":
        return (Bucket(slots, full),)
    tokens = {slots, slots * (1 + length // 4), slots * (1 + length // 2), full}
    return tuple(Bucket(slots, count) for count in sorted(tokens))


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
