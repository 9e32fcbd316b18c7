"""Puts the parts of an engine together, from checked arguments."""

from typing import Any

from dspark_jax.config import Speculation
from dspark_jax.decoding import arguments
from dspark_jax.serving import admission
from dspark_jax.serving.batching import BucketGrid, check_buckets, default_buckets
from dspark_jax.serving.engine_config import MAX_PROGRAMS, EngineConfig
from dspark_jax.serving.loop import StepLoop
from dspark_jax.serving.metrics import Recorder
from dspark_jax.serving.planning import RoundPlanner
from dspark_jax.serving.runner import StepRunner
from dspark_jax.serving.step_spec import Params, StepSpec
from dspark_jax.types import Drafter, PyTree, Target


def make_loop(
    target: Target,
    target_params: PyTree,
    drafter: Drafter | None,
    drafter_params: PyTree,
    config: EngineConfig,
    costs: Any,
    temperatures: Any,
) -> tuple[BucketGrid, StepLoop]:
    """The shapes of an engine's steps and the loop that runs them.

    Raises:
      TypeError, ValueError: as `Engine`.
    """
    admission.check_models(target, target_params, drafter, drafter_params, config)
    options = Speculation(
        draft_length=config.draft_length, rule=config.rule, candidates=config.candidates
    )
    if config.mode == "plain":
        drafter = drafter_params = temperatures = None
    length = arguments.check_models(target, drafter, options)
    if temperatures is not None:
        temperatures = arguments.make_temperatures(temperatures, length)
    buckets = config.buckets
    if buckets is None:
        buckets = default_buckets(config.mode, config.num_slots, length)
    check_buckets(buckets, config.mode, config.num_slots, length)
    grid = BucketGrid(buckets)
    defers = drafter is not None and grid.has_any_plain
    num_programs = len(grid.buckets) + len(config.prefill_sizes) + defers
    if num_programs > MAX_PROGRAMS:
        raise ValueError(
            f"buckets must make at most {MAX_PROGRAMS} programs with those for "
            f"prefill{' and for catching up' if defers else ''}, got {num_programs}"
        )
    spec = StepSpec(
        target=target,
        drafter=drafter,
        options=options,
        draft_length=length,
        sampling_fields=config.sampling_fields,
        max_stop_tokens=config.max_stop_tokens,
        num_rounds=config.rounds_per_step,
        caps_commit=config.mode == "cap-accept",
        is_budgeted=config.is_metered,
        chunk=config.chunk,
        pages_per_slot=config.pages_per_slot,
    )
    planner = RoundPlanner(config, grid, length, costs)
    params = Params(
        target=target_params, drafter=drafter_params, temperatures=temperatures
    )
    runner = StepRunner(spec, params, config, defers=defers)
    return grid, StepLoop(config, runner, planner, Recorder(length))
