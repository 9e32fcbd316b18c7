"""The training command: texts, then drafters, then files.

`python -m dspark_jax.training.run configs/smollm2_dspark.toml --work runs/a` lets the
target write its texts, trains all drafters of the configuration in one program, and
leaves `state.safetensors` (restart with --resume), `metrics.jsonl`,
`draft_vocabulary.json` and one DeepSpec folder a drafter. Progress goes to stderr; the
last line of stdout is a JSON object.
"""

import argparse
import dataclasses
import functools
import json
import pathlib
import signal
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
from dspark_jax.training import anchors, corpus, data, losses, saving
from dspark_jax.training import step as step_lib
from dspark_jax.training.data import Rows
from dspark_jax.training.step import Batch, Frozen, TrainConfig, TrainState
from dspark_jax.types import PyTree, Target

_BANNED = tuple(i for i in range(17) if i != 2)  # control tokens but the end of turn


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrafterSpec:
    """What one drafter has of its own; blocks are shaped like the target's."""

    name: str
    num_layers: int = 3
    markov_kind: str = "vanilla"
    markov_rank: int = 64
    confidence_kind: str = "markov"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A training run; see `configs/smollm2_dspark.toml`."""

    target: str
    drafters: tuple[DrafterSpec, ...]
    train: TrainConfig
    block_size: int
    mask_token: int
    tap_layers: tuple[int, ...]
    compute_dtype: str = "bfloat16"
    seed: int = 0
    row_length: int = 320
    write_rows: int = 2048
    write_seconds: float = 120.0
    max_rows: int = 131072
    max_prefix: int = 176
    max_user: int = 96
    held_out_rows: int = 256
    batch_rows: int = 64
    train_seconds: float = 900.0
    steps: int | None = None
    checkpoint_seconds: float = 150.0
    log_every: int = 50


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
    clock = _Clock(start)
    drafters = drafter_configs(config, target)
    saved = work / "state.safetensors"
    params = initial_params(config, drafters, target_params)
    state = step_lib.init_state(params, config.train)
    numbers: dict[str, np.ndarray] = {}
    if resume:
        state, numbers = saving.load_state(saved, state)
        clock.log(f"resumed at step {int(state.step)}")
    if resume and (work / "corpus.npz").is_file():
        rows, num_batches = (
            saving.load_rows(work / "corpus.npz"),
            numbers["num_batches"],
        )
    else:
        max_batches = config.max_rows // config.write_rows
        rows, num_batches = write_corpus(
            config,
            target,
            target_params,
            tokenizer,
            max_batches=int(numbers.get("num_batches", max_batches)),
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
        scale = tap_scale(config, target, target_params, drafters, rows)
    train = dataclasses.replace(config.train, tap_scale=scale)
    trainer = _Trainer(config, train, target, target_params, drafters, rows)
    if resume:
        total = int(numbers["total_steps"])
        trainer.compile(state)
    else:
        state, total = trainer.plan(state, params, clock)
    figures |= {
        "total_steps": total,
        "tap_scale": scale,
        "num_batches": int(num_batches),
    }
    numbers = {
        "num_batches": np.int64(num_batches),
        "total_steps": np.int64(total),
        "tap_scale": np.asarray(scale, np.float32),
    }

    def checkpoint(state: TrainState) -> dict[str, Any]:
        saving.save_state(saved, state, numbers)
        for spec, drafter, p in zip(
            config.drafters, drafters, state.params, strict=True
        ):
            saving.export(work / spec.name, drafter, p, scale)
        found = trainer.held_out(state)
        _append(work / "metrics.jsonl", {"step": int(state.step), "held_out": found})
        clock.log(f"step {int(state.step)} held out: {_brief(found)}")
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


def drafter_configs(config: RunConfig, target: Target) -> tuple[DrafterConfig, ...]:
    """The drafters' configurations; their blocks are the target's plus q and k norms."""
    block = dataclasses.replace(target.config.block, qk_norm=True)
    return tuple(
        DrafterConfig(
            vocab_size=target.config.vocab_size,
            num_layers=spec.num_layers,
            block=block,
            max_position=target.config.max_position,
            block_size=config.block_size,
            mask_token=config.mask_token,
            tap_layers=config.tap_layers,
            num_target_layers=target.config.num_layers,
            markov_kind=spec.markov_kind,  # type: ignore[arg-type]
            markov_rank=spec.markov_rank,
            confidence_kind=spec.confidence_kind,  # type: ignore[arg-type]
            compute_dtype=config.compute_dtype,
            target_fingerprint=target.config.fingerprint,
        )
        for spec in config.drafters
    )


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
    settings = corpus.data_config(
        tokenizer, length=config.row_length, max_user=config.max_user, banned=_BANNED
    )
    compiled = jax.jit(data.write_rows, static_argnames=("target", "config"))

    def write_rows(key, shared, prefixes):
        return compiled(
            key, shared, prefixes, target_params, target=target, config=settings
        )

    return corpus.write(
        config.seed,
        tokenizer,
        write_rows,
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
    config: RunConfig,
    target: Target,
    target_params: PyTree,
    drafters: tuple[DrafterConfig, ...],
    rows: Rows,
) -> tuple[float, ...]:
    """Factors of the tapped layers, measured on a few rows."""
    states = jax.jit(
        functools.partial(
            step_lib.target_states, target, drafters=drafters, config=config.train
        )
    )
    few = jax.tree.map(lambda x: x[:16], rows)
    batch = Batch(tokens=few.tokens.astype(jnp.int32), loss_mask=few.loss_mask)
    found = states(target_params, batch)
    return step_lib.measure_tap_scale(found, len(config.tap_layers))


class _Clock:
    """Seconds since the start, on every progress line; SIGTERM asks for a stop."""

    def __init__(self, start: float):
        self.start = start
        self.is_stopped = False

    def log(self, text: str) -> None:
        sys.stderr.write(f"[{time.monotonic() - self.start:7.1f} s] {text}\n")
        sys.stderr.flush()

    def stop(self, *_: Any) -> None:
        self.is_stopped = True


class _Trainer:
    """The compiled step and what it is fed with."""

    def __init__(self, config, train, target, target_params, drafters, rows):
        self.config, self.train_config = config, train
        held = config.held_out_rows
        self.rows = jax.tree.map(lambda x: x[held:], rows)
        self.held_rows = jax.tree.map(lambda x: x[:held], rows)
        self.target_params = target_params
        self.head = jax.jit(losses.head_matrix, static_argnums=0)(target, target_params)
        self.key = jax.random.fold_in(jax.random.key(config.seed), 2)
        static = {"target": target, "drafters": drafters, "config": train}
        self._step = jax.jit(
            functools.partial(_corpus_step, **static), donate_argnames=("state",)
        )
        self._evaluate = jax.jit(functools.partial(_corpus_loss, **static))
        self.compile_seconds = 0.0

    def step(self, state: TrainState, index: int, total: int):
        """Step `index` of `total`; the state is donated."""
        rows = corpus.rows_of_step(
            self.config.seed, index, self.config.batch_rows, self.rows.tokens.shape[0]
        )
        rate = step_lib.learning_rate(index, total, self.train_config)
        ce = step_lib.ce_weight(index, total, self.train_config)
        return self._compiled(
            state=state,
            key=self.key,
            corpus_rows=self.rows,
            index=jnp.asarray(rows),
            target_params=self.target_params,
            head=self.head,
            rate=jnp.float32(rate),
            ce=jnp.float32(ce),
        )

    def compile(self, state: TrainState) -> None:
        """Compiles the step for this state."""
        start = time.monotonic()
        lowered = self._step.lower(
            state=state,
            key=self.key,
            corpus_rows=self.rows,
            index=jnp.zeros(self.config.batch_rows, jnp.int32),
            target_params=self.target_params,
            head=self.head,
            rate=jnp.float32(0),
            ce=jnp.float32(0),
        )
        self._compiled = lowered.compile()
        self.compile_seconds = time.monotonic() - start

    def plan(self, state: TrainState, params: tuple, clock: _Clock):
        """Measures a few steps, then starts afresh with as many as the time allows."""
        self.compile(state)
        clock.log(f"compiled the step in {self.compile_seconds:.1f} s")
        if self.config.steps is not None:
            return state, self.config.steps
        kept = jax.tree.map(np.asarray, params)  # the state is donated
        state, _ = self.step(state, 0, 1000)
        jax.block_until_ready(state)
        start, count = time.monotonic(), 30
        for index in range(count):
            state, _ = self.step(state, index, 1000)
        jax.block_until_ready(state)
        seconds = (time.monotonic() - start) / count
        # A few per cent for checkpoints, evaluation and logs.
        total = max(int(0.96 * self.config.train_seconds / seconds), 1)
        clock.log(f"{1e3 * seconds:.1f} ms a step: {total} steps")
        params = jax.tree.map(jnp.asarray, kept)
        return step_lib.init_state(params, self.train_config), total

    def train(self, state, total, path, checkpoint, clock):
        """Steps from the state's own number to `total`; stops early on SIGTERM."""
        previous = signal.signal(signal.SIGTERM, clock.stop)
        first = int(state.step)
        saved = logged = time.monotonic()
        waiting: list[Any] = []
        for index in range(first, total):
            state, outcomes = self.step(state, index, total)
            waiting.append(outcomes)
            is_last = index == total - 1 or clock.is_stopped
            if len(waiting) == self.config.log_every or is_last:
                found = _summarise(waiting, self.config.drafters)
                now = time.monotonic()
                record = {
                    "step": index + 1,
                    "step_ms": round(1e3 * (now - logged) / len(waiting), 2),
                    "learning_rate": step_lib.learning_rate(
                        index, total, self.train_config
                    ),
                    "drafters": found,
                }
                _append(path, record)
                clock.log(f"step {index + 1}/{total} {_brief(found)}")
                waiting, logged = [], time.monotonic()
            if clock.is_stopped:
                break
            if time.monotonic() - saved > self.config.checkpoint_seconds:
                checkpoint(state)
                saved = logged = time.monotonic()
        signal.signal(signal.SIGTERM, previous)
        return state

    def held_out(self, state: TrainState) -> dict[str, Any]:
        """Metrics on rows that are never trained on; the same anchors every time."""
        found = []
        size = self.config.batch_rows
        for begin in range(0, self.held_rows.tokens.shape[0] - size + 1, size):
            index = jnp.arange(begin, begin + size, dtype=jnp.int32)
            found.append(
                self._evaluate(
                    params=state.params,
                    key=self.key,
                    corpus_rows=self.held_rows,
                    index=index,
                    target_params=self.target_params,
                    head=self.head,
                )
            )
        return _summarise(found, self.config.drafters) if found else {}


def _corpus_step(
    state,
    key,
    corpus_rows,
    index,
    target_params,
    head,
    rate,
    ce,
    *,
    target,
    drafters,
    config,
):
    return step_lib.train_step(
        jax.random.fold_in(key, state.step),
        state,
        _take(corpus_rows, index),
        target_params,
        rate,
        ce,
        target=target,
        drafters=drafters,
        config=config,
        frozen=Frozen(None, head),
    )


def _corpus_loss(
    params, key, corpus_rows, index, target_params, head, *, target, drafters, config
):
    batch = _take(corpus_rows, index)
    states = step_lib.target_states(
        target, target_params, batch, drafters=drafters, config=config
    )
    chosen = anchors.sample(
        jax.random.fold_in(key, index[0]), batch.loss_mask, config.num_anchors
    )
    return step_lib.evaluate(
        params,
        batch,
        states,
        chosen,
        target,
        target_params,
        Frozen(None, head),
        jnp.float32(config.ce_weight),
        drafters=drafters,
        config=config,
    )


def _take(rows: Rows, index: jax.Array) -> Batch:
    return Batch(
        tokens=jnp.take(rows.tokens, index, axis=0).astype(jnp.int32),
        loss_mask=jnp.take(rows.loss_mask, index, axis=0),
    )


def _summarise(outcomes: list, specs: tuple[DrafterSpec, ...]) -> dict[str, Any]:
    """Ratios of sums over several steps, by drafter."""
    outcomes = jax.device_get(outcomes)
    found = {}
    for number, spec in enumerate(specs):
        own = [outcome[number] for outcome in outcomes]
        record = {
            "loss": round(float(np.mean([o.loss for o in own])), 5),
            "gradient_norm": round(float(np.mean([o.gradient_norm for o in own])), 4),
        }
        for name in own[0].metrics:
            top = np.sum([o.metrics[name][0] for o in own], axis=0)
            bottom = np.sum([o.metrics[name][1] for o in own], axis=0)
            record[name] = np.round(top / np.maximum(bottom, 1e-6), 5).tolist()
        found[spec.name] = record
    return found


def _brief(found: dict[str, Any]) -> str:
    return " | ".join(
        f"{name}: loss {r['loss']:.4f} tau {r['tau_probabilistic']:.4f} "
        f"accept {r['accept_rate'][0]:.4f}"
        for name, r in found.items()
    )


def _append(path: pathlib.Path, record: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    sys.exit(main())
