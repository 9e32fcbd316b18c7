"""A run's programs, compiled and fed by step number, over a mesh of devices.

The batch, the anchors and the learning rate of a step depend on the seed and the step's
number only, so that a restart continues as if nothing had happened.
"""

import functools
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from dspark_jax.config import DrafterConfig
from dspark_jax.training import settings, sharding, vocabulary, warm_start
from dspark_jax.training import step as step_lib
from dspark_jax.training.objective import Outcome
from dspark_jax.training.runs import programs, run_config
from dspark_jax.training.runs.programs import StepReport
from dspark_jax.training.runs.run_config import RunConfig
from dspark_jax.training.runs.training_data import BatchSource
from dspark_jax.training.settings import TrainConfig
from dspark_jax.training.step import TrainState
from dspark_jax.training.target_states import Batch
from dspark_jax.types import PyTree, Target


class Placement(NamedTuple):
    """How a run's arrays lie on its devices."""

    mesh: Mesh
    state: PyTree  # a sharding for every array of a TrainState
    batch: NamedSharding
    everywhere: NamedSharding  # the target, on every device


class Trainer:
    """The compiled step and what it is fed with.

    Args:
      config, train: of the run; `train` has the measured tap factors.
      batches: whole batches of `config.batch_rows` rows.
    """

    def __init__(
        self,
        config: RunConfig,
        train: TrainConfig,
        target: Target,
        target_params: PyTree,
        drafters: tuple[DrafterConfig, ...],
        batches: BatchSource,
    ):
        self.config, self.train_config = config, train
        self.target, self.drafters, self.batches = target, drafters, batches
        self.placement = place(config, jax.eval_shape(self._init, target_params))
        everywhere = self.placement.everywhere
        self.target_params = jax.device_put(target_params, everywhere)
        self.head = jax.jit(vocabulary.head_matrix, static_argnums=0)(
            target, self.target_params
        )
        key = jax.random.key(config.seed)
        self._key = jax.device_put(jax.random.fold_in(key, 2), everywhere)
        self._held_out_key = jax.device_put(jax.random.fold_in(key, 3), everywhere)
        static: dict[str, Any] = {
            "target": target,
            "drafters": drafters,
            "recipes": run_config.recipes(config),
            "config": train,
            "mesh": self.placement.mesh,
        }
        self._step = jax.jit(
            functools.partial(programs.step, **static, micro_steps=config.micro_steps),
            static_argnames=("on_policy",),
            donate_argnames=("state",),
            out_shardings=(self.placement.state, everywhere),
        )
        self._evaluate = jax.jit(functools.partial(programs.evaluate, **static))
        self._compiled: dict[tuple[tuple[int, ...], bool], Any] = {}

    def init_state(self) -> TrainState:
        """Step 0: every drafter from the seed, or from its `init_from`.

        Raises:
          ValueError: a folder to start from that does not fit (`warm_start.load`).
        """
        # Not jitted: one program that draws every matrix compiles for minutes on a GPU.
        state = jax.device_put(self._init(self.target_params), self.placement.state)
        params = list(state.params)
        for index, spec in enumerate(self.config.drafters):
            if spec.init_from is not None:
                params[index] = jax.device_put(
                    warm_start.load(
                        spec.init_from,
                        self.drafters[index],
                        state.params[index],
                        self.train_config.tap_scale,
                    ),
                    self.placement.state.params[index],
                )
        return state.replace(params=tuple(params))

    def abstract_state(self) -> TrainState:
        """Shapes, dtypes and shardings of a state, to load one."""
        return jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=sharding
            ),
            jax.eval_shape(self._init, self.target_params),
            self.placement.state,
        )

    def step(
        self, state: TrainState, batch: Batch, index: int, total: int
    ) -> tuple[TrainState, StepReport]:
        """Step `index` of `total` on the batch of that step; the state is donated."""
        on_policy = settings.is_on_policy(index, total, self.train_config)
        compiled = self.compile(state, batch, on_policy=on_policy)
        rate = settings.learning_rate(index, total, self.train_config)
        ce = settings.ce_weights(index, total, run_config.recipes(self.config))
        return compiled(**self._inputs(state, batch, rate, ce))

    def compile(
        self, state: TrainState, batch: Batch, *, on_policy: bool = False
    ) -> Any:
        """The step's program for batches of this shape, compiled once."""
        program = tuple(batch.tokens.shape), on_policy
        if program not in self._compiled:
            inputs = self._inputs(state, batch, 0.0, [0.0] * len(self.drafters))
            lowered = self._step.lower(**inputs, on_policy=on_policy)
            self._compiled[program] = lowered.compile()
        return self._compiled[program]

    def held_out(
        self, state: TrainState, batches: tuple[Batch, ...]
    ) -> dict[str, dict[str, Any]]:
        """Metrics on batches that are never trained on; always the same anchors."""
        found = []
        for number, batch in enumerate(batches):
            # Parts of the size of a micro-step: what fits in training fits here.
            for part in range(self.config.micro_steps):
                rows = jax.tree.map(
                    lambda x, part=part: x[part :: self.config.micro_steps], batch
                )
                found.append(
                    self._evaluate(
                        self._held_out_key,
                        np.uint32(number * self.config.micro_steps + part),
                        state.params,
                        jax.device_put(rows, self.placement.batch),
                        self.target_params,
                        self.head,
                    )
                )
        summary = summarise(jax.device_get(found), self.names)
        for record in summary.values():
            del record["gradient_norm"]  # there is none without a step
        return summary

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(spec.name for spec in self.config.drafters)

    def _init(self, target_params: PyTree) -> TrainState:
        # One key for all: drafters that differ in a head begin with one backbone.
        key = jax.random.fold_in(jax.random.key(self.config.seed), 1)
        params = tuple(
            step_lib.init_params(key, drafter, target_params.final_norm)
            for drafter in self.drafters
        )
        return step_lib.init_state(params, self.train_config)

    def _inputs(
        self, state: TrainState, batch: Batch, rate: float, ce: list[float]
    ) -> dict[str, Any]:
        return {
            "key": self._key,
            "state": state,
            "batch": jax.device_put(batch, self.placement.batch),
            "target_params": self.target_params,
            "head": self.head,
            "rate": np.float32(rate),
            "ce": np.asarray(ce, np.float32),
        }


def place(config: RunConfig, state: PyTree) -> Placement:
    """The run's mesh and shardings.

    Raises:
      ValueError: more devices than there are, or batches that cannot be divided.
    """
    mesh = sharding.make_mesh(
        config.data_parallel or 0, config.fsdp, jax.local_devices()
    )
    rows = config.batch_rows // config.micro_steps
    if rows % mesh.size:
        raise ValueError(
            "batch_rows / micro_steps must be a multiple of data_parallel x fsdp = "
            f"{mesh.shape['data']} x {mesh.shape['fsdp']}, got {rows} "
            "(data_parallel = 1 takes one device)"
        )
    return Placement(
        mesh=mesh,
        state=sharding.state_sharding(mesh, state),
        batch=sharding.batch_sharding(mesh),
        everywhere=sharding.replicated(mesh),
    )


def summarise(
    outcomes: list[tuple[Outcome, ...]], names: tuple[str, ...]
) -> dict[str, dict[str, Any]]:
    """Ratios of sums over several steps, by drafter; host arrays in."""
    found = {}
    for number, name in enumerate(names):
        own = [outcome[number] for outcome in outcomes]
        record: dict[str, Any] = {
            "loss": round(float(np.mean([o.loss for o in own])), 5),
            "gradient_norm": round(float(np.mean([o.gradient_norm for o in own])), 4),
        }
        for metric in own[0].metrics:
            top = np.sum([o.metrics[metric][0] for o in own], axis=0)
            bottom = np.sum([o.metrics[metric][1] for o in own], axis=0)
            record[metric] = np.round(top / np.maximum(bottom, 1e-6), 5).tolist()
        found[name] = record
    return found
