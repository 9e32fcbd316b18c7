"""The training command: texts, then drafters, then files.

`python -m dspark_jax.training.run configs/smollm2_dspark.toml --work runs/a` lets the
target write its texts, trains all drafters of the configuration in one program, and
leaves `state.safetensors` (restart with --resume), `metrics.jsonl`,
`draft_vocabulary.json` and one DeepSpec folder a drafter. Progress goes to stderr; the
last line of stdout is a JSON object.
"""

import argparse
import dataclasses
import json
import pathlib
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax import config as config_lib
from dspark_jax import tensor_files
from dspark_jax.config import DrafterConfig
from dspark_jax.targets import load as target_load
from dspark_jax.targets import tokenizer as tokenizer_lib
from dspark_jax.training import corpus, data, saving, settings, target_states
from dspark_jax.training import step as step_lib
from dspark_jax.training import trainer as trainer_lib
from dspark_jax.training.data import Rows
from dspark_jax.training.settings import RunConfig
from dspark_jax.training.step import TrainState
from dspark_jax.types import PyTree, Target


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=pathlib.Path)
    parser.add_argument("--work", type=pathlib.Path, required=True)
    parser.add_argument("--pieces", type=pathlib.Path, help="exports as small pieces")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--train-seconds", type=float)
    parser.add_argument("--write-seconds", type=float)
    parser.add_argument("--steps", type=int)
    options = parser.parse_args(arguments)
    config = config_lib.load_toml(options.config, RunConfig)
    for name in ("train_seconds", "write_seconds", "steps"):
        if getattr(options, name) is not None:
            config = dataclasses.replace(config, **{name: getattr(options, name)})
    target, target_params = target_load.load_target(
        config.target, param_dtype=config.compute_dtype
    )
    tokenizer = tokenizer_lib.load_tokenizer(config.target)
    result = run(
        config,
        target,
        target_params,
        tokenizer,
        work=options.work,
        pieces=options.pieces,
        resume=options.resume,
    )
    sys.stdout.write(json.dumps(result) + "\n")
    return 0


def run(
    config: RunConfig,
    target: Target,
    target_params: PyTree,
    tokenizer: corpus.ChatTokenizer,
    *,
    work: pathlib.Path,
    pieces: pathlib.Path | None = None,
    resume: bool = False,
) -> dict[str, Any]:
    """Writes texts, trains, exports; returns the run's figures."""
    work.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    clock = trainer_lib.Clock(start)
    drafters = settings.drafter_configs(config, target)
    saved = work / "state.safetensors"
    params = initial_params(config, drafters, target_params)
    state = step_lib.init_state(params, config.train)
    numbers: dict[str, np.ndarray] = {}
    if resume:
        state, numbers = saving.load_state(saved, state)
        clock.log(f"resumed at step {int(state.step)}")
    known = int(numbers.get("num_batches", config.max_rows // config.write_rows))
    if resume and (work / "corpus.npz").is_file():
        rows, num_batches = saving.load_rows(work / "corpus.npz"), known
    else:
        rows, num_batches = write_corpus(
            config,
            target,
            target_params,
            tokenizer,
            max_batches=known,
            seconds=float("inf") if resume else config.write_seconds,
            log=clock.log,
        )
        saving.save_rows(work / "corpus.npz", rows)
    write_vocabulary(work / "draft_vocabulary.json", rows, target)
    figures = describe(rows, time.monotonic() - start)
    clock.log(f"corpus: {figures}")
    if resume:
        scale = tuple(float(x) for x in numbers["tap_scale"])
    else:
        scale = tap_scale(config, target, target_params, rows)
    train = dataclasses.replace(config.train, tap_scale=scale)
    trainer = trainer_lib.Trainer(config, train, target, target_params, drafters, rows)
    if resume:
        total = int(numbers["total_steps"])
        trainer.compile(state)
    else:
        state, total = trainer.plan(state, params, clock)
    figures |= {
        "total_steps": total,
        "tap_scale": scale,
        "num_batches": num_batches,
    }
    numbers = {
        "num_batches": np.asarray(num_batches),
        "total_steps": np.asarray(total),
        "tap_scale": np.asarray(scale, np.float32),
    }

    def checkpoint(state: TrainState) -> dict[str, Any]:
        saving.save_state(saved, state, numbers)
        for spec, drafter, p in zip(
            config.drafters, drafters, state.params, strict=True
        ):
            saving.export(work / spec.name, drafter, p, scale)
        found = trainer.held_out(state)
        trainer_lib.append(
            work / "metrics.jsonl", {"step": int(state.step), "held_out": found}
        )
        clock.log(f"step {int(state.step)} held out: {trainer_lib.brief(found)}")
        if pieces is not None:
            names = [spec.name for spec in config.drafters]
            names += ["metrics.jsonl", "draft_vocabulary.json"]
            saving.write_pieces(pieces, {name: work / name for name in names})
        return found

    state = trainer.train(state, total, work / "metrics.jsonl", checkpoint, clock)
    figures |= {"step": int(state.step), "held_out": checkpoint(state)}
    figures["seconds"] = round(time.monotonic() - start, 1)
    tensor_files.write_json(work / "run.json", figures)
    return figures


def initial_params(
    config: RunConfig, drafters: tuple[DrafterConfig, ...], target_params: PyTree
) -> tuple:
    """Step 0 of every drafter, each from its own key."""
    key = jax.random.fold_in(jax.random.key(config.seed), 1)
    return tuple(
        step_lib.init_params(
            jax.random.fold_in(key, index), drafter, target_params.final_norm
        )
        for index, drafter in enumerate(drafters)
    )


def write_corpus(
    config: RunConfig,
    target: Target,
    target_params: PyTree,
    tokenizer: corpus.ChatTokenizer,
    *,
    max_batches: int,
    seconds: float,
    log: Any,
) -> tuple[Rows, int]:
    """Lets the target write rows until a budget is spent."""
    how = corpus.data_config(
        tokenizer,
        length=config.row_length,
        max_user=config.max_user,
        banned=config.never_sampled,
    )
    compiled = jax.jit(data.write_rows, static_argnames=("target", "config"))

    def write_rows(key, shared, prefixes):
        return compiled(key, shared, prefixes, target_params, target=target, config=how)

    return corpus.write(
        config.seed,
        tokenizer,
        write_rows,
        vocab_size=target.config.vocab_size,
        batch=config.write_rows,
        max_prefix=config.max_prefix,
        max_batches=max_batches,
        seconds=seconds,
        log=log,
    )


def write_vocabulary(path: pathlib.Path, rows: Rows, target: Target) -> None:
    """Ids of the corpus's answers by frequency, for drafting from a smaller head."""
    ids = corpus.frequent_tokens(rows, target.config.vocab_size)
    fingerprint = target.config.fingerprint
    tensor_files.write_json(path, {"ids": ids, "target_fingerprint": fingerprint})


def describe(rows: Rows, seconds: float) -> dict[str, Any]:
    """Counts of a corpus."""
    mask = np.asarray(rows.loss_mask)
    return {
        "num_rows": int(mask.shape[0]),
        "num_answer_tokens": int(mask.sum()),
        "answer_share": round(float(mask.mean()), 4),
        "write_seconds": round(seconds, 1),
    }


def tap_scale(
    config: RunConfig, target: Target, target_params: PyTree, rows: Rows
) -> tuple[float, ...]:
    """Factors of the tapped layers, measured on a few rows."""
    batch = trainer_lib.take(rows, jnp.arange(min(16, rows.tokens.shape[0])))
    compiled = jax.jit(
        target_states.compute, static_argnames=("target", "tap_layers", "attention")
    )
    states = compiled(
        target=target,
        target_params=target_params,
        batch=batch,
        tap_layers=config.tap_layers,
        attention=config.train.attention,
    )
    return target_states.measure_tap_scale(states, len(config.tap_layers))


if __name__ == "__main__":
    sys.exit(main())
