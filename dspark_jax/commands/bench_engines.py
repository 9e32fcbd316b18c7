"""The engines of `dspark bench serve`: one a mode for several loads.

An engine has shapes for a few numbers of requests, and at most 12 programs. Loads of
neighbouring concurrencies share one, as they would when serving: fewer programs are
compiled and measured, and the last requests of a load run in a smaller shape. All
programs of all engines are compiled side by side, before the first trial.
"""

import argparse
from collections.abc import Mapping
from typing import Any, NamedTuple

from dspark_jax.commands import bench, unpriced
from dspark_jax.commands.bench_models import BenchModels
from dspark_jax.scheduling.costs import Costs
from dspark_jax.scheduling.online_costs import OnlineCosts
from dspark_jax.serving import Engine, EngineConfig, profile, warm_up
from dspark_jax.serving.batching import buckets_of

_METERED = ("compact", "cap-accept")
_MEASURED_STEPS, _MEASURED_REPEATS = 4, 3
_SIZES_OF_AN_ENGINE = 3  # numbers of requests: 9 programs, 2 for prefill, 1 to catch up
_PREFILL_ROWS = 1024  # of the larger prefill program, at most


class Group(NamedTuple):
    """Loads that share an engine a mode."""

    num_slots: int
    sizes: tuple[int, ...] | None  # of its shapes, in requests; None: the engine's own
    engines: dict[str, Engine]
    about: dict[str, Any]  # for the result


def make_groups(
    arguments: argparse.Namespace,
    models: BenchModels,
    costs: Costs | None,
    temperatures: Any,
) -> list[Group]:
    """The groups of all loads, with engines that have compiled nothing yet."""
    sizes = sorted(arguments.concurrency)
    groups = [
        _make_group(arguments, models, tuple(of_group), costs, temperatures)
        for of_group in (
            sizes[at : at + _SIZES_OF_AN_ENGINE]
            for at in range(0, len(sizes), _SIZES_OF_AN_ENGINE)
        )
    ]
    if arguments.rates:
        groups.append(_make_group(arguments, models, None, costs, temperatures))
    return groups


def compile_all(groups: list[Group]) -> float:
    """Compiles the programs of all engines; returns seconds."""
    return warm_up([e for group in groups for e in group.engines.values()])


def measure_costs(group: Group) -> None:
    """Measures the steps of the compact engine, and gives metered ones the table."""
    engine = group.engines.get("compact")
    if engine is None:
        return
    most = engine.max_measured_context(_MEASURED_STEPS)
    measured = profile.measure_steps(
        engine,
        sorted({max(most // 4, 1), most}),
        num_steps=_MEASURED_STEPS,
        repeats=_MEASURED_REPEATS,
    )
    group.about["step_costs"] = [step._asdict() for step in measured]
    _price(group.engines, profile.make_costs(measured, {}, is_fastest=True))


def differences(
    info: Mapping[str, Any], result: Mapping[str, Any], arguments: argparse.Namespace
) -> list[str]:
    """In what a cost table was measured otherwise, as "device A (here B)".

    Args:
      info: what the table says of itself (see `dspark profile`); the rest is not
        compared.
      result: of this run.
      arguments: of this run.
    """
    here = {name: result[name] for name in ("device", "target", "dtype", "rule")}
    drafter = result["drafter"]
    here["drafter"] = drafter["name"] if isinstance(drafter, dict) else drafter
    for name in ("draft_vocabulary", "candidates", "page_size"):
        here[name] = getattr(arguments, name)
    if arguments.draft_length is not None:
        here["draft_length"] = arguments.draft_length
    here["is_greedy"] = arguments.temperature == 0
    return [
        f"{name} {info[name]} (here {value})"
        for name, value in here.items()
        if info.get(name, value) != value
    ]


def _price(engines: dict[str, Engine], costs: Costs) -> None:
    """Gives each metered engine a table of its own, which it keeps up to date."""
    for mode in set(_METERED) & set(engines):
        engines[mode].use_costs(OnlineCosts(costs))


def _make_group(
    arguments: argparse.Namespace,
    models: BenchModels,
    sizes: tuple[int, ...] | None,
    costs: Costs | None,
    temperatures: Any,
) -> Group:
    num_slots = arguments.slots if sizes is None else sizes[-1]
    with unpriced.engines():
        engines = {
            mode: _make_engine(arguments, models, mode, num_slots, sizes, temperatures)
            for mode in arguments.modes
        }
    if costs is not None:
        _price(engines, costs)
    about = {
        "num_slots": num_slots,
        "num_programs": {mode: e.num_programs for mode, e in engines.items()},
        "shapes": {
            mode: [[bucket.requests, bucket.tokens] for bucket in e.buckets]
            for mode, e in engines.items()
        },
    }
    return Group(num_slots, sizes, engines, about)


def _make_engine(
    arguments: argparse.Namespace,
    models: BenchModels,
    mode: str,
    num_slots: int,
    sizes: tuple[int, ...] | None,
    temperatures: Any,
) -> Engine:
    length = arguments.draft_length or models.drafter.config.block_size
    longest = models.longest_prompt + arguments.max_new_tokens
    # Room to measure steps at the longest context, too, and one that leads in.
    num_rounds = (1 + _MEASURED_STEPS) * arguments.rounds_per_step
    longest += num_rounds * (1 + length)
    rows = min(max(num_slots // 4, 1) * 64, _PREFILL_ROWS)
    settings = EngineConfig(
        mode=mode,  # type: ignore[arg-type]
        num_slots=num_slots,
        max_length=min(longest, models.target.config.max_position + 1),
        page_size=arguments.page_size,
        rule=bench.rule_of(arguments),  # type: ignore[arg-type]
        draft_length=arguments.draft_length,
        candidates=arguments.candidates,
        buckets=None if sizes is None else buckets_of(mode, sizes, length),
        chunk=arguments.chunk,
        prefill_groups=max(rows // arguments.chunk, 1),
        sampling_fields=("temperature",) if arguments.temperature > 0 else (),
        max_stop_tokens=max(len(models.stop_tokens), 1),
        rounds_per_step=arguments.rounds_per_step,
    )
    if mode == "plain":
        return Engine(models.target, models.target_params, config=settings)
    return Engine(
        models.target,
        models.target_params,
        models.drafter,
        models.drafter_params,
        config=settings,
        temperatures=temperatures,
    )
