"""`dspark calibrate`: temperatures that make a drafter's confidences probabilities."""

import argparse
import json
import pathlib
import time
from typing import TYPE_CHECKING, Any

from dspark_jax.commands import failure, options

if TYPE_CHECKING:  # They import JAX.
    import jax

    from dspark_jax.commands.drafters import Loaded
    from dspark_jax.evaluation.calibrate import Judged
    from dspark_jax.evaluation.recording import Recording

SUMMARY = "fit the temperatures of a drafter's confidences on held-back text"
DESCRIPTION = """\
Decodes with the drafter, records how confident every round was and what the target
accepted, and fits one temperature a draft position (sequential temperature scaling), so
that products of confidences are the shares of prefixes that are accepted. Half of the
prompts fit, the other half judges. A calibration belongs to one rule and one sampling
temperature; take text that the drafter was not trained on. The file is the one that
SGLang reads.
"""
EPILOG = """\
examples:
  dspark calibrate --prompts held_back.jsonl --output sts.json
  dspark calibrate --corpus answers.jsonl --rule block --output sts_block.json
  dspark calibrate --drafter runs/a/drafters/x --temperature 0.7 --rounds 20000
  dspark calibrate --json | jq .ece_after_mean

Prompts are JSON Lines with id, domain and prompt; a corpus has conversations, whose
first user turns are the prompts. When they run out, decoding goes on with new seeds.
"""


_FEW = 1000  # The standard error of a share of one half is then 1.6 %.


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `dspark calibrate`."""
    options.add_drafter(parser)
    add = parser.add_argument_group("text").add_argument
    add("--prompts", metavar="FILE", help="JSON Lines: id, domain, prompt")
    add("--corpus", metavar="FILE", help="JSON Lines: conversations")
    add(
        "--rounds",
        type=int,
        default=50_000,
        metavar="N",
        help="recorded for each half (default %(default)s)",
    )
    add = options.add_decoding(parser, max_new_tokens=128)
    add(
        "--temperature",
        type=float,
        default=1.0,
        metavar="T",
        help="of sampling (default 1); at 0 each prompt is decoded once",
    )
    options.add_rule(add)
    options.add_draft_length(add)
    options.add_models(parser)
    options.add_output(
        parser,
        output="write the temperatures there, as JSON",
        plot="write reliability diagrams there",
    )


def run(arguments: argparse.Namespace) -> int:
    """Runs the command and returns its exit status."""
    _check(arguments)
    from dspark_jax.evaluation import calibrate, figures, plots, prompts

    with failure.of_input():
        if arguments.plot is not None:
            figures.check_installed()
        if arguments.corpus is not None:
            chosen = prompts.load_conversations(arguments.corpus)
        else:
            chosen = prompts.load(arguments.prompts)
        chosen = prompts.in_turns(chosen)
        sides = calibrate.halves([prompt.domain for prompt in chosen])
    source = arguments.drafter or options.default_drafter(arguments.target, "calibrate")

    from dspark_jax.commands import drafters

    loaded = drafters.load(arguments, [source], chosen)
    (drafter,) = loaded.drafters
    if not drafter.has_confidence:
        raise failure.Failure(
            f"--drafter needs a confidence head to calibrate; {drafter.name} has none"
        )
    begin = time.perf_counter()
    with failure.of_input():
        fitted_on, judged_by = (
            _collect(arguments, loaded, side, name)
            for side, name in zip(sides, ("to fit", "to judge"), strict=True)
        )
        judged = calibrate.judge(
            fitted_on,
            judged_by,
            rule=arguments.rule,
            temperature=arguments.temperature,
            dataset=_dataset(arguments),
            seed=arguments.seed,
        )
        result = _result(arguments, loaded, judged)
        result["seconds"] = time.perf_counter() - begin
        if arguments.output is not None:
            from dspark_jax.scheduling import calibration

            calibration.write(arguments.output, judged.calibration)
        if arguments.plot is not None:
            plots.reliability(arguments.plot, judged.before, judged.after)
    if arguments.json:
        print(json.dumps(result))  # noqa: T201
    else:
        _print_table(result)
    return 0


def _check(arguments: argparse.Namespace) -> None:
    """Refuses what can be refused before a model is loaded."""
    options.check(arguments, options.COMMON_RULES | {"rounds": options.at_least(1)})
    options.check_exists(arguments, "drafter", "target", "prompts", "corpus")
    if arguments.prompts is not None and arguments.corpus is not None:
        raise failure.Failure("--prompts and --corpus exclude each other")
    if arguments.drafter == "prompt-lookup":
        raise failure.Failure("--drafter needs a confidence head, not prompt-lookup")
    options.check_parent("output", arguments.output)
    options.check_parent("plot", arguments.plot)


def _collect(
    arguments: argparse.Namespace, loaded: "Loaded", side: list[int], name: str
) -> "Recording":
    import jax

    from dspark_jax.commands.progress import Progress
    from dspark_jax.evaluation import calibrate, rounds

    (drafter,) = loaded.drafters
    longest = max(map(len, loaded.ids))
    width = -(-longest // rounds.WIDTH_MULTIPLE) * rounds.WIDTH_MULTIPLE

    def record(chosen: Any, keys: "jax.Array") -> "Recording":
        (recording,) = rounds.record(
            loaded.target,
            loaded.target_params,
            drafter.drafter,
            [drafter.params],
            [loaded.ids[i] for i in chosen],
            keys,
            temperature=arguments.temperature,
            rule=arguments.rule,
            draft_length=arguments.draft_length,
            max_new_tokens=arguments.max_new_tokens,
            batch=arguments.batch,
            stop_tokens=loaded.stop_tokens,
            candidates=arguments.candidates,
            width=width,
        )
        return recording

    progress: Progress = Progress(name, "rounds")
    recording = calibrate.collect(
        record,
        side,
        arguments.rounds,
        key=jax.random.key(arguments.seed),
        batch=arguments.batch,
        is_random=arguments.temperature > 0,
        progress=progress,
    )
    line = f"{name}: {recording.num_rounds} rounds, τ {recording.accepted_length:.3f}"
    if recording.num_rounds < arguments.rounds:
        line += (
            f" (fewer than --rounds {arguments.rounds}: at temperature 0 a prompt has "
            "one answer; give more prompts)"
        )
    progress.end(line)
    return recording


def _dataset(arguments: argparse.Namespace) -> str:
    path = arguments.corpus or arguments.prompts
    return "prompts of the library" if path is None else pathlib.PurePath(path).name


def _result(
    arguments: argparse.Namespace, loaded: "Loaded", judged: "Judged"
) -> dict[str, Any]:
    from dspark_jax.evaluation import provenance, reliability

    before, after = (reliability.summarise(x) for x in (judged.before, judged.after))
    (drafter,) = loaded.drafters
    return {
        "command": "calibrate",
        **provenance.of_machine(),
        "target": pathlib.PurePath(arguments.target).name,
        "drafter": drafter.describe(),
        "dtype": arguments.dtype,
        "rule": arguments.rule,
        "temperature": arguments.temperature,
        "seed": arguments.seed,
        "dataset": judged.calibration.dataset,
        "num_prompts": len(loaded.prompts),
        "temperatures": list(judged.calibration.temperatures),
        "num_rounds_fitted": judged.num_fitted,
        "num_rounds_judged": judged.num_judged,
        "num_fitted_at": judged.num_fitted_at,
        "num_judged_at": judged.num_judged_at,
        "num_reached_at": judged.num_reached_at,
        "ece_before_mean": before.ece_mean,
        "ece_before_worst": before.ece_worst,
        "ece_after_mean": after.ece_mean,
        "ece_after_worst": after.ece_worst,
        "ideal_ece_mean": after.ideal_ece_mean,
        "ideal_ece_worst": after.ideal_ece_worst,
        "before": reliability.to_json(judged.before),
        "after": reliability.to_json(judged.after),
        "output": arguments.output,
    }


def _print_table(result: dict[str, Any]) -> None:
    import rich.table

    from dspark_jax.commands import terminal

    table = rich.table.Table(
        title=f"calibration of {result['drafter']['name']}, rule {result['rule']}, "
        f"T = {result['temperature']:g}, judged by {result['num_rounds_judged']} rounds"
    )
    for name in (
        "slot",
        "temperature",
        "raw ECE %",
        "ECE %",
        "ideal",
        "AUROC",
        "verified, fit",
        "verified",
        "reached",
    ):
        table.add_column(name, justify="right")

    def percent(value: float | None) -> str:
        return "-" if value is None else f"{100 * value:.2f}"

    before, after = result["before"], result["after"]
    for k, temperature in enumerate(result["temperatures"]):
        slot = after["slots"][k]
        area = slot["auroc"]
        table.add_row(
            str(k + 1),
            f"{temperature:.3f}",
            percent(before["slots"][k]["ece"]),
            percent(slot["ece"]),
            percent(slot["ideal_ece"]),
            "-" if area is None else f"{area:.3f}",
            *(str(result[f"num_{n}_at"][k]) for n in ("fitted", "judged", "reached")),
        )
    for name in ("mean", "worst"):
        errors = (
            before[f"ece_{name}"],
            after[f"ece_{name}"],
            after[f"ideal_ece_{name}"],
        )
        table.add_row(name, "", *map(percent, errors))
    terminal.print_result(table)
    fewest = min(result["num_fitted_at"])
    if fewest < _FEW:
        more = "more --rounds" if result["temperature"] > 0 else "more prompts"
        error = 50 / max(fewest, 1) ** 0.5  # percent, of a share of one half
        terminal.print_result(
            f"the last slot was fitted on {fewest} verified drafts, so that a share of "
            f"one half has a standard error of {error:.1f} %; give {more}"
        )
