"""The compiled step of a run, fed from a corpus on the device.

The rows, the anchors and the learning rate of a step depend on the seed and its number
only, so that a restart continues as if nothing had happened.
"""

import functools
import json
import pathlib
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.config import DrafterConfig
from dspark_jax.training import (
    anchors,
    corpus,
    losses,
    objective,
    settings,
    target_states,
)
from dspark_jax.training import step as step_lib
from dspark_jax.training.data import Rows
from dspark_jax.training.objective import Outcome
from dspark_jax.training.settings import (
    DrafterSpec,
    Recipe,
    RunConfig,
    TrainConfig,
)
from dspark_jax.training.step import TrainState
from dspark_jax.training.target_states import Batch
from dspark_jax.types import PyTree, Target


class Trainer:
    """The compiled step and what it is fed with."""

    def __init__(
        self,
        config: RunConfig,
        train: TrainConfig,
        target: Target,
        target_params: PyTree,
        drafters: tuple[DrafterConfig, ...],
        rows: Rows,
    ):
        self.config, self.train_config = config, train
        held = config.held_out_rows
        self.rows = jax.tree.map(lambda x: x[held:], rows)
        self.held_rows = jax.tree.map(lambda x: x[:held], rows)
        self.target_params = target_params
        self.head = jax.jit(losses.head_matrix, static_argnums=0)(target, target_params)
        self.key = jax.random.fold_in(jax.random.key(config.seed), 2)
        static: dict[str, Any] = {
            "target": target,
            "drafters": drafters,
            "config": train,
            "recipes": settings.recipes(config),
        }
        self.recipes = settings.recipes(config)
        self._step = jax.jit(
            functools.partial(_corpus_step, **static), donate_argnames=("state",)
        )
        self._evaluate = jax.jit(functools.partial(_corpus_loss, **static))
        self.compile_seconds = 0.0

    def step(
        self, state: TrainState, index: int, total: int
    ) -> tuple[TrainState, tuple[Outcome, ...]]:
        """Step `index` of `total`; the state is donated."""
        rows = corpus.rows_of_step(
            self.config.seed, index, self.config.batch_rows, self.rows.tokens.shape[0]
        )
        rate = settings.learning_rate(index, total, self.train_config)
        ce = settings.ce_weights(index, total, self.recipes)
        return self.compiled(
            state=state,
            key=self.key,
            corpus_rows=self.rows,
            index=jnp.asarray(rows),
            target_params=self.target_params,
            head=self.head,
            rate=jnp.float32(rate),
            ce=jnp.asarray(ce, jnp.float32),
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
            ce=jnp.zeros(len(self.recipes), jnp.float32),
        )
        self.compiled = lowered.compile()
        self.compile_seconds = time.monotonic() - start

    def plan(
        self, state: TrainState, params: tuple, clock: "Clock"
    ) -> tuple[TrainState, int]:
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

    def train(
        self,
        state: TrainState,
        total: int,
        path: pathlib.Path,
        checkpoint: Callable[[TrainState], Any],
        clock: "Clock",
    ) -> TrainState:
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
                    "learning_rate": settings.learning_rate(
                        index, total, self.train_config
                    ),
                    "drafters": found,
                }
                append(path, record)
                clock.log(f"step {index + 1}/{total} {brief(found)}")
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
    state: TrainState,
    key: jax.Array,
    corpus_rows: Rows,
    index: jax.Array,
    target_params: PyTree,
    head: jax.Array,
    rate: jax.Array,
    ce: jax.Array,
    *,
    target: Target,
    drafters: tuple[DrafterConfig, ...],
    recipes: tuple[Recipe, ...],
    config: TrainConfig,
) -> tuple[TrainState, tuple[Outcome, ...]]:
    return step_lib.train_step(
        jax.random.fold_in(key, state.step),
        state,
        take(corpus_rows, index),
        target_params,
        rate,
        ce,
        target=target,
        drafters=drafters,
        recipes=recipes,
        config=config,
        head=head,
    )


def _corpus_loss(
    params: tuple,
    key: jax.Array,
    corpus_rows: Rows,
    index: jax.Array,
    target_params: PyTree,
    head: jax.Array,
    *,
    target: Target,
    drafters: tuple[DrafterConfig, ...],
    recipes: tuple[Recipe, ...],
    config: TrainConfig,
) -> tuple[Outcome, ...]:
    batch = take(corpus_rows, index)
    states = target_states.compute(
        target, target_params, batch, drafters[0].tap_layers, config.attention
    )
    key = jax.random.fold_in(key, index[0])
    return objective.evaluate(
        params,
        batch,
        states,
        anchors.sample(key, batch.loss_mask, config.num_anchors),
        functools.partial(target.embed, target_params),
        head,
        jnp.asarray([recipe.loss.ce_weight for recipe in recipes], jnp.float32),
        drafters=drafters,
        recipes=recipes,
        config=config,
    )


def take(rows: Rows, index: jax.Array) -> Batch:
    """The rows of these indices, for a step."""
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


def brief(found: dict[str, Any]) -> str:
    """One line about every drafter."""
    return " | ".join(
        f"{name}: loss {r['loss']:.4f} tau {r['tau_probabilistic']:.4f} "
        f"accept {r['accept_rate'][0]:.4f}"
        for name, r in found.items()
    )


def append(path: pathlib.Path, record: dict[str, Any]) -> None:
    """Adds one JSON object as a line."""
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")


class Clock:
    """Seconds since the start, on every progress line; SIGTERM asks for a stop."""

    def __init__(self, start: float):
        self.start = start
        self.is_stopped = False

    def log(self, text: str) -> None:
        sys.stderr.write(f"[{time.monotonic() - self.start:7.1f} s] {text}\n")
        sys.stderr.flush()

    def stop(self, *_: Any) -> None:
        self.is_stopped = True
