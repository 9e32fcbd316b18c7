"""One conversation on the device: compiled programs and the state that they advance.

Shapes come from buckets, so that prompts of different lengths run the same compiled
programs, also those that an earlier process left in the persistent cache. Programs are
compiled ahead of their first use: no clock here counts a compilation.
"""

import concurrent.futures
import dataclasses
import functools
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from dspark_jax import types
from dspark_jax.config import Speculation
from dspark_jax.decoding import stepwise
from dspark_jax.sampling import Sampling
from dspark_jax.types import DecodeState, Drafter, PyTree, Target

LEAST_BUCKET = 32
# On a CPU, YNNPACK plans every matrix product when it first runs: 0.6 s for the 210 of
# SmolLM2, more than it saves on a prompt of up to this many tokens, which is fed once.
PLANNED_WIDTH = 256
_WITHOUT_YNNPACK = {"xla_cpu_experimental_ynn_fusion_type": ""}


class SessionConfig(NamedTuple):
    """The static side of a session; drafter None is plain decoding."""

    target: Target
    drafter: Drafter | None
    options: Speculation


class Inputs(NamedTuple):
    """The traced side that every program shares."""

    target_params: PyTree
    drafter_params: PyTree
    sampling: Sampling
    stop_tokens: np.ndarray  # int32 [n]
    confidence_threshold: np.ndarray | None  # float32 []


@dataclasses.dataclass
class Turn:
    """One answer: its tokens and what they cost."""

    num_prompt_tokens: int
    tokens: list[int] = dataclasses.field(default_factory=list)
    finish_reason: str = types.FINISH_REASONS[types.RUNNING]
    prefill_seconds: float = 0.0  # up to the first token
    first_token_at: float = 0.0  # time.perf_counter() then
    first_token_seconds: float = 0.0  # since the command began, loading included
    seconds: float = 0.0  # of decoding, after the first token
    num_rounds: int = 0
    num_verified: int = 0
    num_accepted: int = 0
    accepted_sum: int = 0

    @property
    def is_running(self) -> bool:
        return self.finish_reason == types.FINISH_REASONS[types.RUNNING]

    @property
    def tokens_per_second(self) -> float | None:
        """Speed of decoding alone: the first token comes from the prefill."""
        return (len(self.tokens) - 1) / self.seconds if self.seconds else None

    @property
    def accepted_length(self) -> float | None:
        """τ of this answer."""
        return self.accepted_sum / self.num_rounds if self.num_rounds else None


class Session:
    """Feeds turns, and hands out tokens as they are accepted.

    Args:
      config: static.
      inputs: traced.
      seed: of the key that all draws come from.
      rounds_per_step: rounds between two looks of the host (plain decoding: tokens).
    """

    def __init__(
        self, config: SessionConfig, inputs: Inputs, seed: int, rounds_per_step: int
    ):
        self.history: list[int] = []  # every token so far
        self._config = config
        self._inputs = inputs
        self._key = jax.random.key(seed)
        self._rounds = np.int32(rounds_per_step)
        self._state: Any = None
        self._capacity = 0
        self._programs: dict[Any, tuple[Any, Any]] = {}
        self._advance: concurrent.futures.Future[tuple[Any, Any]]
        self._pool = concurrent.futures.ThreadPoolExecutor(max_workers=1)

    def start_turn(
        self, ids: Sequence[int], max_new_tokens: int, *, spare: int = 0
    ) -> Turn:
        """Feeds `ids` and draws the first token; `step` draws the others.

        Only the new turn is fed, unless the caches are too small for it: then they are
        made anew with room for `spare` more tokens, and the whole history is fed.

        Raises:
          ValueError: the conversation passes the target's last position.
        """
        last = self._config.target.config.max_position
        length = len(self.history) + len(ids)
        if length > last:
            raise ValueError(
                f"the conversation has {length} tokens, more than the {last} positions "
                "of the target"
            )
        # The target has no position for more; a cache for them would only cost time.
        max_new_tokens = min(max_new_tokens, last + 1 - length)
        is_extended = length + max_new_tokens <= self._capacity
        fed = list(ids) if is_extended else [*self.history, *ids]
        width = min(bucket(len(fed)), last)
        tokens = np.zeros((1, width), np.int32)
        tokens[0, : len(fed)] = fed
        turn_inputs = (
            tokens,
            np.array([len(fed)], np.int32),
            np.array([max_new_tokens], np.int32),
            self._inputs,
        )
        static: dict[str, Any] = {"config": self._config}
        if is_extended:
            first, arguments = _extend, (self._state, *turn_inputs)
        else:
            most = width + last + 1 - length
            self._capacity = min(bucket(width + max_new_tokens + spare), most)
            static["capacity"] = self._capacity
            first, arguments = _begin, (self._key, *turn_inputs)
        shapes = (width, self._capacity)
        program, state = self._program(first, shapes, arguments, static)
        # The first token does not wait for the program that draws the others.
        self._advance = self._pool.submit(
            self._program,
            _advance,
            (self._capacity,),
            (state, self._rounds, self._inputs),
            {"config": self._config},
        )
        turn = Turn(num_prompt_tokens=len(ids))
        started = time.perf_counter()
        self._state = program(*arguments)
        self.history += ids
        self._collect(turn)
        turn.first_token_at = time.perf_counter()
        turn.prefill_seconds = turn.first_token_at - started
        return turn

    def step(self, turn: Turn) -> None:
        """Runs a few rounds, and adds their tokens and cost to `turn`."""
        program, _ = self._advance.result()
        started = time.perf_counter()
        self._state = program(self._state, self._rounds, self._inputs)
        self._collect(turn)
        turn.seconds += time.perf_counter() - started

    def warm_up(self, ids: Sequence[int], max_new_tokens: int) -> Turn:
        """Runs every program once: a first execution is slower than the next ones."""
        turn = self.start_turn(ids, max_new_tokens)
        self.step(turn)
        self.history, self._state, self._capacity = [], None, 0
        return turn

    def _program(self, function: Any, shapes: Any, arguments: Any, static: Any) -> Any:
        """The compiled program for these shapes, and the shapes of its result."""
        name = (function, shapes)
        if name not in self._programs:
            lowered = function.lower(*arguments, **static)
            is_short = function is not _advance and shapes[0] <= PLANNED_WIDTH
            is_cpu = jax.default_backend() == "cpu"
            compiled = lowered.compile(
                _WITHOUT_YNNPACK if is_short and is_cpu else None
            )
            self._programs[name] = (compiled, lowered.out_info)
        return self._programs[name]

    def _collect(self, turn: Turn) -> None:
        state: DecodeState = self._state
        tokens, lengths, finish, stats = jax.device_get(
            (state.tokens, state.lengths, state.finish, state.stats)
        )
        new = tokens[0, len(self.history) : int(lengths[0])].tolist()
        self.history += new
        turn.tokens += new
        turn.finish_reason = types.FINISH_REASONS[int(finish[0])]
        if stats is not None:
            turn.num_rounds = int(stats.num_rounds[0])
            turn.num_verified = int(stats.num_verified[0])
            turn.num_accepted = int(stats.num_accepted[0])
            turn.accepted_sum = int(stats.accepted_sum[0])


def bucket(size: int) -> int:
    """The least of 32, 48, 64, 96, 128, 192, ... that is at least `size`."""
    power = LEAST_BUCKET
    while power < size:
        if size <= power * 3 // 2:
            return power * 3 // 2
        power *= 2
    return power


@functools.partial(jax.jit, static_argnames=("config", "capacity"))
def _begin(
    key: jax.Array,
    tokens: jax.Array,
    lengths: jax.Array,
    limits: jax.Array,
    inputs: Inputs,
    *,
    config: SessionConfig,
    capacity: int,
) -> DecodeState:
    return stepwise.prefill(
        key,
        tokens,
        lengths,
        limits=limits,
        capacity=capacity,
        max_new_tokens=capacity - tokens.shape[1],
        **_models(config, inputs),
    )


@functools.partial(jax.jit, static_argnames="config", donate_argnames="state")
def _extend(
    state: DecodeState,
    tokens: jax.Array,
    lengths: jax.Array,
    limits: jax.Array,
    inputs: Inputs,
    *,
    config: SessionConfig,
) -> DecodeState:
    # Every turn is counted by itself.
    state = state.replace(stats=jax.tree.map(jax.numpy.zeros_like, state.stats))
    return stepwise.extend(
        state,
        tokens,
        lengths,
        limits=limits,
        max_new_tokens=state.tokens.shape[1],
        **_models(config, inputs),
    )


@functools.partial(jax.jit, static_argnames="config", donate_argnames="state")
def _advance(
    state: DecodeState, num_rounds: Any, inputs: Inputs, *, config: SessionConfig
) -> DecodeState:
    arguments = _models(config, inputs)
    if config.drafter is None:
        for name in ("drafter", "drafter_params", "options"):
            del arguments[name]
        return stepwise.autoregressive_steps(state, num_rounds, **arguments)
    return stepwise.speculative_rounds(
        state,
        num_rounds,
        confidence_threshold=inputs.confidence_threshold,
        **arguments,
    )


def _models(config: SessionConfig, inputs: Inputs) -> dict[str, Any]:
    return {
        "target": config.target,
        "target_params": inputs.target_params,
        "drafter": config.drafter,
        "drafter_params": inputs.drafter_params,
        "options": config.options,
        "sampling": inputs.sampling,
        "stop_tokens": inputs.stop_tokens,
    }
