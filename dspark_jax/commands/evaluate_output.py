"""What `dspark evaluate` hands out: a JSON file that grows, tables, figures."""

import argparse
import collections
import pathlib
import re
from typing import Any

import rich.table

from dspark_jax.commands import terminal
from dspark_jax.commands.evaluate import RESULT_FILE
from dspark_jax.evaluation import acceptance, plots
from dspark_jax.evaluation.prompts import ALL
from dspark_jax.evaluation.report import Run
from dspark_jax.evaluation.timing import Timing
from dspark_jax.scheduling import json_files


class Output:
    """Collects runs; the file holds everything so far after each of them."""

    def __init__(self, arguments: argparse.Namespace, header: dict[str, Any]):
        self._result = header | {"runs": [], "wall_clock": [], "is_complete": False}
        self._drafters = {one["name"]: one for one in header["drafters"]}
        self._is_quiet, self._has_plots = arguments.json, arguments.plot
        self._folder = None if arguments.output is None else _folder(arguments.output)
        self._runs: list[Run] = []  # of the current setting
        self._timings: list[tuple[int, dict[str, Timing]]] = []

    def add_run(self, run: Run) -> None:
        self._runs.append(run)
        self._result["runs"].append(run.to_json())
        self._save()

    def add_timings(
        self, temperature: float, rule: str, batch: int, timings: dict[str, Timing]
    ) -> None:
        self._timings.append((batch, timings))
        self._result["wall_clock"].append(
            {
                "temperature": temperature,
                "rule": rule,
                "batch": batch,
                "loops": {name: timing._asdict() for name, timing in timings.items()},
            }
        )
        self._save()

    def end_of_setting(self, temperature: float, rule: str) -> None:
        """Tables and figures of one temperature and rule."""
        runs, timings = self._runs, self._timings
        self._runs, self._timings = [], []
        if not self._is_quiet:
            words = "greedy" if temperature == 0 else f"T = {temperature:g}, {rule}"
            terminal.print_result(*_tables(words, runs))
            for batch, by_name in timings:
                table = _timing_table(f"{words}, batch {batch}", by_name)
                terminal.print_result(table)
        if self._has_plots and self._folder is not None:
            name = "t0" if temperature == 0 else f"t{temperature:g}_{rule}"
            self._plot(self._folder, name, runs)

    def end(self) -> dict[str, Any]:
        """The whole result."""
        self._result["is_complete"] = True
        self._save()
        return self._result

    def _save(self) -> None:
        if self._folder is not None:
            json_files.write(self._folder / RESULT_FILE, self._result)

    def _plot(self, folder: pathlib.Path, name: str, runs: list[Run]) -> None:
        series = {run.name: run.domains for run in runs}
        plots.conditional_acceptance(folder / f"conditional_{name}.png", series)
        plots.accepted_length(folder / f"accepted_length_{name}.png", series)
        for run in runs:
            part = re.sub(r"[^\w.-]+", "_", run.drafter)
            ending = f"{name}_{part}_k{run.draft_length}.png"
            if run.thresholds:
                plots.thresholds(folder / f"thresholds_{ending}", run.thresholds)
            if run.raw is not None:
                path = folder / f"reliability_{ending}"
                plots.reliability(path, run.raw, run.calibrated)
        for field, label in (
            ("num_layers", "drafter layers"),
            ("block_size", "block size"),
        ):
            points = self._by_size(runs, field)
            if points:
                path = folder / f"by_{field}_{name}.png"
                plots.by_size(path, points, label)

    def _by_size(self, runs: list[Run], field: str) -> dict[str, list]:
        """Lines of τ against a size, where drafters differ in it."""
        other = "block_size" if field == "num_layers" else "num_layers"
        lines = collections.defaultdict(list)
        for run in runs:
            one = self._drafters[run.drafter]
            if one[field] is None or run.draft_length != one["block_size"]:
                continue
            head = one["markov_kind"]
            kind = "DFlash" if head == "none" else f"DSpark ({head})"
            unit = "layers" if other == "num_layers" else "block"
            lines[f"{kind}, {unit} {one[other]}"].append((one[field], run.domains))
        sizes = {size for line in lines.values() for size, _ in line}
        return dict(lines) if len(sizes) > 1 else {}


def _folder(name: str) -> pathlib.Path:
    folder = pathlib.Path(name)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _tables(words: str, runs: list[Run]) -> list[rich.table.Table]:
    length = rich.table.Table(title=f"accepted length τ by domain, {words}")
    length.add_column("")
    for name in ("prompts", "rounds", "τ", "95 %", "repeated"):
        length.add_column(name, justify="right")
    for run in runs:
        length.add_row(run.name, style="bold")
        for domain, found in run.domains.items():
            length.add_row(
                f"  {domain}",
                str(found.num_prompts),
                str(found.num_rounds),
                _number(found.accepted_length),
                _interval(found.interval_95),
                f"{100 * found.repeated_20gram_share:.1f} %",
            )
        mean = acceptance.mean_over_domains(run.domains)
        length.add_row("  mean of domains", "", "", _number(mean))
    slots = max(run.draft_length for run in runs)
    conditional = _slot_table(f"conditional acceptance by position, {words}", slots)
    for run in runs:
        shares = run.domains[ALL].conditional_acceptance
        conditional.add_row(run.name, *map(_number, shares))
    caps = _slot_table(f"τ if at most k drafts are verified, {words}", slots)
    for run in runs:
        caps.add_row(run.name, *map(_number, run.domains[ALL].accepted_length_by_cap))
    tables = [length, conditional, caps]
    tables += [_threshold_table(words, run) for run in runs if run.thresholds]
    tables += [_reliability_table(words, run, slots) for run in runs if run.raw]
    return tables


def _slot_table(title: str, slots: int) -> rich.table.Table:
    table = rich.table.Table(title=title)
    table.add_column("")
    for k in range(slots):
        table.add_column(str(k + 1), justify="right")
    return table


def _threshold_table(words: str, run: Run) -> rich.table.Table:
    table = rich.table.Table(
        title=f"confidence threshold, {run.name}, {words} ({run.thresholds_method})"
    )
    names = (
        "threshold",
        "τ",
        "drafts verified",
        "rejected",
        "of drafts accepted",
        "with the own token",  # as the paper counts (Figure 5)
    )
    for name in names:
        table.add_column(name, justify="right")
    for row in run.thresholds[ALL]:
        table.add_row(
            f"{row.threshold:g}",
            _number(row.accepted_length),
            _number(row.num_verified_per_round),
            _number(row.num_rejected_per_round),
            _percent(row.draft_acceptance_rate),
            _percent(row.acceptance_rate),
        )
    return table


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def _reliability_table(words: str, run: Run, slots: int) -> rich.table.Table:
    table = _slot_table(f"confidences, {run.name}, {words}", slots)
    for name, values in (("raw", run.raw), ("calibrated", run.calibrated)):
        if values is None:
            continue
        for field, label, scale in (
            ("ece", "ECE %", 100),
            ("ideal_ece", "ideal ECE %", 100),
            ("auroc", "AUROC", 1),
            ("brier", "Brier", 1),
        ):
            cells = [getattr(value, field) for value in values]
            cells = [None if cell is None else scale * cell for cell in cells]
            table.add_row(f"{name} {label}", *map(_number, cells))
    return table


def _timing_table(words: str, timings: dict[str, Timing]) -> rich.table.Table:
    table = rich.table.Table(title=f"time, {words}")
    table.add_column("loop")
    for name in ("tokens/s", "times plain", "whole call", "ms a round", "τ"):
        table.add_column(name, justify="right")
    for name, one in timings.items():
        table.add_row(
            name,
            f"{one.tokens_per_second:.1f}",
            _number(one.speedup_over_plain_median),
            _number(one.whole_call_speedup_median),
            _number(one.ms_per_round),
            _number(one.accepted_length),
        )
    return table


def _interval(interval: tuple[float, float] | None) -> str:
    return "-" if interval is None else f"{interval[0]:.2f} - {interval[1]:.2f}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
