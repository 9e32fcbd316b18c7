"""`dspark train`: drafters for a frozen target, from a configuration file."""

import argparse
import json
import pathlib
import signal
import sys
from typing import TYPE_CHECKING, Any

from dspark_jax.commands import failure, terminal

if TYPE_CHECKING:  # They import JAX, which a mistyped option need not wait for.
    from dspark_jax.training.runs.run_config import RunConfig
    from dspark_jax.training.runs.training_data import BatchSource
    from dspark_jax.types import PyTree, Target

SUMMARY = "train drafters for a target that stays as it is"
DESCRIPTION = """\
Trains the drafters of a TOML configuration and leaves them in a folder, in the layout
that DeepSpec, SGLang and vLLM load. A run may be stopped or killed at any moment: the
same command goes on from its last checkpoint, with the same batches, anchors and steps.
Without a corpus the target first writes the texts itself.
"""
EPILOG = """\
examples:
  dspark train configs/smollm2_dspark.toml --dry-run      memory, speed, time; no files
                                                          (3 steps: minutes on a CPU)
  dspark train configs/smollm2_dspark.toml --work runs/a  start, or go on
  dspark train configs/smollm2_dspark.toml --work runs/b --steps 2000 \\
      --set train.learning_rate=6e-4 --set drafters.0.num_layers=2
  dspark train runs/a/config.toml --work runs/again       the same run once more
  dspark generate --drafter runs/a/drafters/dspark-smollm2-135m "Hello"

The run's folder holds config.toml, config.json, plan.json, metrics.jsonl, checkpoints/,
drafters/, with the extra "plots" plots/, with the extra "tensorboard" events/ and, at
the end, run.json. Ctrl-C takes a checkpoint and ends with status 130, SIGTERM with 143.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `dspark train`."""
    parser.add_argument("config", type=pathlib.Path, help="a TOML file, see configs/")
    add = parser.add_argument_group("the run").add_argument
    add(
        "--work",
        type=pathlib.Path,
        metavar="DIR",
        help="the run's folder (default: runs/ and the configuration's name)",
    )
    add = parser.add_mutually_exclusive_group().add_argument
    add(
        "--resume", action="store_true", help="fail unless there is a run to go on with"
    )
    add("--fresh", action="store_true", help="delete the run in the folder first")
    add = parser.add_argument_group("changes to the configuration").add_argument
    add("--steps", type=int, metavar="N", help="number of steps")
    add(
        "--train-seconds",
        type=float,
        metavar="S",
        help="as many steps as take S seconds here; fixed at the first start",
    )
    add(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="changes",
        help="any key, dotted: train.learning_rate=6e-4, drafters.0.num_layers=2",
    )
    add = parser.add_argument_group("output").add_argument
    add(
        "--dry-run",
        action="store_true",
        help="parameters, memory, speed after three steps, time of the run; no files",
    )
    add("--json", action="store_true", help="print one JSON object as the last line")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command and returns its exit status."""
    _check(arguments)
    if not arguments.config.is_file():
        raise failure.Failure(f"there is no configuration file {arguments.config}")

    from dspark_jax.training.runs import run_config, run_folder

    with failure.of_input():
        config = run_config.load(arguments.config, _changes(arguments))
    if arguments.dry_run:
        return _estimate(arguments, config)
    work = arguments.work or pathlib.Path("runs") / arguments.config.stem
    with failure.of_input():
        folder = run_folder.open_folder(
            work, config, is_fresh=arguments.fresh, must_resume=arguments.resume
        )
        finished = folder.read_result()
    if finished is not None:
        _say(f"the run in {work} is complete: step {finished.get('step')}")
        return _end(arguments, finished | {"folder": str(work)})

    from dspark_jax.targets import fetch
    from dspark_jax.targets import tokenizer as tokenizer_lib
    from dspark_jax.training.runs import loop, session
    from dspark_jax.training.runs import run as run_lib
    from dspark_jax.training.runs.progress import Progress
    from dspark_jax.training.runs.stopping import Stop

    with failure.of_input():
        target, target_params = _load_target(config)
        tokenizer = tokenizer_lib.load_tokenizer(fetch.locate(config.target))
    with Progress() as progress, Stop() as stop:
        with failure.of_input():
            prepared = run_lib.prepare(
                folder, target, target_params, tokenizer, progress=progress, stop=stop
            )
        if prepared is None:
            result = session.stopped(stop)
        else:
            try:
                result = run_lib.train(prepared, progress=progress, stop=stop)
            except loop.NotFiniteError as error:
                raise failure.Failure(str(error), status=1) from error
    return _end(arguments, result | {"folder": str(work)})


def _check(arguments: argparse.Namespace) -> None:
    """Refuses what can be refused before JAX is imported."""
    if arguments.steps is not None and arguments.train_seconds is not None:
        raise failure.Failure("--steps and --train-seconds exclude each other")
    for name, value in (
        ("--steps", arguments.steps),
        ("--train-seconds", arguments.train_seconds),
    ):
        if value is not None and not 0 < value < float("inf"):
            raise failure.Failure(f"{name} must be positive and finite, got {value}")
    if arguments.dry_run and (arguments.fresh or arguments.resume):
        raise failure.Failure("--dry-run neither resumes a run nor deletes one")


def _changes(arguments: argparse.Namespace) -> list[str]:
    changes = list(arguments.changes)
    if arguments.steps is not None:
        changes.append(f"steps={arguments.steps}")
    if arguments.train_seconds is not None:
        changes += [f"train_seconds={arguments.train_seconds}", "steps="]
    return changes


def _load_target(config: "RunConfig") -> tuple["Target", "PyTree"]:
    from dspark_jax.targets import fetch
    from dspark_jax.targets import load as target_load

    with failure.of_input(source="`target`"), terminal.status("loading the target"):
        path = fetch.locate(config.target)
        return target_load.load_target(path, param_dtype=config.compute_dtype)


def _estimate(arguments: argparse.Namespace, config: "RunConfig") -> int:
    from dspark_jax.training.runs import dry_run
    from dspark_jax.training.runs import run as run_lib

    with failure.of_input():
        target, target_params = _load_target(config)
        drafters = run_lib.check(config, target)
        batches: BatchSource
        if config.corpus is None:
            batches = dry_run.RandomBatches(config, target.config.vocab_size)
            counts = {
                "written_by": "the target, before the first step",
                "max_rows": config.max_rows,
                "write_seconds": config.write_seconds,
                "row_length": config.row_length,
            }
        else:
            data = run_lib.read_corpus(config, target)
            batches, counts = data.batches, data.counts
        with terminal.status("compiling the step"):
            result = dry_run.estimate(config, target, target_params, drafters, batches)
    result["data"] = counts
    for line in _table(result):
        _say(line)
    return _end(arguments, result)


def _table(result: dict[str, Any]) -> list[str]:
    """The estimate for a person."""
    from dspark_jax.training.runs import attending

    lines = [
        f"{count:>15,} parameters of {name}"
        for name, count in result["num_params"].items()
    ]
    lines.append(f"{result['num_target_params']:>15,} parameters of the target, frozen")
    for name, size in result["bytes_per_device"].items():
        lines.append(f"{size / 2**30:>15,.3f} GiB a device: {name}")
    lines += [
        f"{result['num_devices']:>15} devices: {result['device']}",
        f"{result['step_ms']:>15,.1f} ms a step",
        f"{result['tokens_per_second']:>15,.0f} tokens/s",
        f"{result['total_steps']:>15,} steps",
        f"{result['train_seconds'] / 60:>15,.1f} minutes of training",
    ]
    lines.append(attending.describe(result["attention"]))
    data = ", ".join(f"{key} {value}" for key, value in result["data"].items())
    return [*lines, f"data: {data}"]


def _end(arguments: argparse.Namespace, result: dict[str, Any]) -> int:
    if arguments.json:
        print(json.dumps(result))  # noqa: T201
    elif "held_out" in result:
        for name, metrics in result["held_out"].items():
            print(  # noqa: T201
                f"{name}: accepted length {metrics['tau_probabilistic']:.3f} (teacher "
                f"forcing, held-out text), in {result['drafters'][name]}"
            )
    name = result.get("stopped_by")
    if name is None:
        return 0
    _say(f"stopped by {name}; the same command goes on")
    return 128 + signal.Signals[name].value


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
