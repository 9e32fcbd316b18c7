"""What `dspark evaluate` runs at one temperature and rule: rounds counted, loops timed.

`commands.evaluate` has its options, `evaluate_output` what is made of the results.
"""

import argparse
import time
from collections.abc import Sequence
from typing import Any

import jax

from dspark_jax import config
from dspark_jax.commands.drafters import PROMPT_LOOKUP, Loaded, NamedDrafter
from dspark_jax.commands.progress import Progress
from dspark_jax.drafters import prompt_lookup
from dspark_jax.evaluation import report, rounds, timing
from dspark_jax.evaluation.recording import Recording
from dspark_jax.evaluation.report import Run
from dspark_jax.evaluation.timing import Timing


def measure(
    arguments: argparse.Namespace,
    loaded: Loaded,
    drafter: NamedDrafter,
    *,
    temperature: float,
    rule: str,
    length: int,
    temperatures: Sequence[float] | None,
) -> Run:
    """Decodes all prompts with a drafter and counts what is accepted.

    `temperatures` are those of the confidences; None leaves them as they are.
    """
    where = f"{drafter.name}, T = {temperature:g}, {rule}, K = {length}"

    def record(label: str, **more: Any) -> Recording:
        progress = Progress(label, "prompts")
        (recording,) = rounds.record(
            loaded.target,
            loaded.target_params,
            drafter.drafter,
            [drafter.params],
            loaded.ids,
            jax.random.key(arguments.seed),
            temperature=temperature,
            rule=rule,
            draft_length=length,
            max_new_tokens=arguments.max_new_tokens,
            batch=arguments.batch,
            stop_tokens=loaded.stop_tokens,
            candidates=arguments.candidates,
            progress=progress,
            **more,
        )
        progress.end(f"{label}: τ {recording.accepted_length:.3f}")
        return recording

    begin = time.perf_counter()
    recording = record(where)
    seconds = time.perf_counter() - begin
    runs = None
    if arguments.threshold_runs and drafter.has_confidence:
        runs = [
            record(
                f"{where}, threshold {threshold:g}",
                confidence_threshold=threshold,
                confidence_temperatures=temperatures,
            )
            for threshold in arguments.thresholds
        ]
    return report.measure(
        recording,
        [prompt.domain for prompt in loaded.prompts],
        drafter=drafter.name,
        temperature=temperature,
        rule=rule,
        thresholds=arguments.thresholds,
        threshold_runs=runs,
        temperatures=temperatures,
        seconds=seconds,
    )


def compare(
    arguments: argparse.Namespace,
    loaded: Loaded,
    lengths: Sequence[tuple[NamedDrafter, int]],
    *,
    temperature: float,
    rule: str,
    batch: int,
) -> dict[str, Timing]:
    """Times decoding with each (drafter, draft length) beside plain decoding.

    Prompt lookup takes part in any case.
    """
    loops = {
        f"{drafter.name}, K = {length}": timing.Loop(
            drafter.drafter,
            drafter.params,
            config.Speculation(
                draft_length=length,
                rule=rule,  # type: ignore[arg-type]
                candidates=arguments.candidates,
            ),
        )
        for drafter, length in lengths
    }
    if all(drafter.name != PROMPT_LOOKUP for drafter in loaded.drafters):
        for length in arguments.draft_length or [4]:
            lookup, nothing = prompt_lookup.make_prompt_lookup(length)
            loops[f"{PROMPT_LOOKUP}, K = {length}"] = timing.Loop(
                lookup,
                nothing,
                config.Speculation(rule=rule),  # type: ignore[arg-type]
            )
    # Prompts alternate between the domains; a last group that is too small is filled.
    count = min(-(-len(loaded.ids) // batch), arguments.groups)
    filled = loaded.ids * (batch // len(loaded.ids) + 2)
    groups = [filled[i * batch : (i + 1) * batch] for i in range(count)]
    progress = Progress(f"time, T = {temperature:g}, {rule}, batch {batch}", "groups")
    done = 0

    def log(line: str) -> None:
        nonlocal done
        del line
        done += 1
        progress(done, count)

    timings = timing.compare(
        loops,
        groups,
        target=loaded.target,
        target_params=loaded.target_params,
        key=jax.random.key(arguments.seed),
        temperature=temperature,
        max_new_tokens=arguments.max_new_tokens,
        repeats=arguments.repeats,
        log=log,
    )
    progress.end()
    return timings
