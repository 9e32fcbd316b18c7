"""The serving engine: a host loop that keeps one step ahead of the device.

Every call of `Engine.step` admits requests, feeds their prompts, dispatches a round for
all that decode, and then reads what the step before it did, while the device runs this
one. The host therefore plans from what it knew a step ago: budgets come from
confidences two steps old, which is also what keeps them lossless; who gets the budget
is decided inside the step, from the live draft.
"""

import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import numpy as np

from dspark_jax import checks
from dspark_jax.sampling import Sampling
from dspark_jax.serving import admission, assembly
from dspark_jax.serving.batching import Bucket
from dspark_jax.serving.engine_config import EngineConfig
from dspark_jax.serving.requests import QueueFullError, RequestHandle
from dspark_jax.serving.runner import compile_programs
from dspark_jax.types import Drafter, PyTree, Target


class EngineError(RuntimeError):
    """The engine cannot go on; the message says why, and whether it is usable."""


class _Call:
    """Lives as long as a call of `Engine.step`."""


class Engine:
    """Serves requests through a target and a drafter; not safe for several threads.

    >>> from dspark_jax.testing import make_tiny_models
    >>> engine = Engine(*make_tiny_models(), config=EngineConfig(max_length=32))
    >>> handle = engine.submit([3, 1, 4], max_new_tokens=5)
    >>> engine.run()
    >>> len(handle.tokens), handle.finish_reason
    (5, 'length')

    Args:
      target, target_params: as in `speculative_generate`; the target's cache must be a
        `DenseCache` used through `cache.attend`, as those of `make_target` are.
      drafter, drafter_params: None for mode "plain".
      config: shapes and choices.
      costs: step times by requests, packed tokens and context
        (`scheduling.costs.Costs`, or `OnlineCosts`, which follows the real ones).
        None: full windows.
      temperatures: [K], calibration of the confidences per slot.

    Raises:
      TypeError, ValueError: an argument breaks a rule, or a model cannot be served.
    """

    def __init__(
        self,
        target: Target,
        target_params: PyTree,
        drafter: Drafter | None = None,
        drafter_params: PyTree = None,
        *,
        config: EngineConfig = EngineConfig(),  # noqa: B008 (frozen)
        costs: Any = None,
        temperatures: Any = None,
    ):
        self._grid, self._loop = assembly.make_loop(
            target, target_params, drafter, drafter_params, config, costs, temperatures
        )
        self.config = config
        self.target = target
        self._num_submitted = 0
        # Dead between two calls of `step`, however the last one ended: a flag that an
        # interrupt left standing would lock the engine.
        self._call: Callable[[], _Call | None] = lambda: None
        self._failure: BaseException | None = None

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The compiled shapes of a step, ascending."""
        return self._grid.buckets

    @property
    def num_programs(self) -> int:
        """Programs that `warm_up` compiles."""
        return len(self._grid.buckets) + len(self._loop.runner.own_programs)

    @property
    def draft_length(self) -> int:
        """K."""
        return self._loop.runner.spec.draft_length

    @property
    def is_idle(self) -> bool:
        """No request waits or runs, and no step is under way."""
        return self._loop.slots.is_empty and not self._loop.in_flight

    def warm_up(self) -> float:
        """Compiles every program by running it on padding; returns seconds."""
        self._check_usable()
        started_at = time.perf_counter()
        admission.touch(self.config, self.target)
        try:
            self._loop.runner.warm_up(self._grid.buckets)
        except jax.errors.JaxRuntimeError as error:
            self._fail_steps(error)
        return time.perf_counter() - started_at

    def use_costs(self, costs: Any) -> None:
        """Takes another table of step times, as `costs` of the constructor."""
        self._loop.planner.use_costs(costs)

    def submit(
        self,
        tokens: Sequence[int] | np.ndarray,
        *,
        max_new_tokens: int,
        sampling: Sampling = Sampling(),  # noqa: B008 (frozen)
        seed: int | jax.Array | None = None,
        stop_tokens: Sequence[int] | None = None,
        on_tokens: Callable[[list[int]], None] | None = None,
    ) -> RequestHandle:
        """Queues a request.

        Args:
          tokens: the prompt's ids.
          max_new_tokens: at least 1; prompt and answer must fit `max_length`.
          sampling: scalars; fields that `EngineConfig.sampling_fields` declares.
          seed: an int, or a typed key; None takes the request's number. Under the rule
            "seeded" the words are those of `autoregressive_generate` with this key.
            Requests of one prompt need different seeds: with the same one they share
            their noise, and are not independent of each other.
          stop_tokens: None takes the target's, () none.
          on_tokens: called with the new tokens as they come. If it raises, the request
            ends with finish_reason "error"; others go on.

        Raises:
          TypeError, ValueError: an argument breaks a rule.
          QueueFullError: `max_waiting` requests wait already.
        """
        self._check_usable()
        most = self.config.max_waiting
        if most is not None and len(self._loop.slots.queue) >= most:
            raise QueueFullError(
                f"{len(self._loop.slots.queue)} requests wait already, as many as "
                f"max_waiting = {most} allows"
            )
        checked = admission.check_request(
            tokens,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            seed=self._num_submitted if seed is None else seed,
            stop_tokens=stop_tokens,
            on_tokens=on_tokens,
            target=self.target,
            config=self.config,
        )
        request = RequestHandle(self, self._num_submitted, **checked)
        self._num_submitted += 1
        self._loop.slots.put(request)
        return request

    def run(self) -> None:
        """Steps until the engine is idle."""
        while self.step():
            pass

    def step(self) -> bool:
        """Dispatches the next step and reads an earlier one; False when idle.

        Raises:
          EngineError: a step failed on the device. Its requests have ended with
            finish_reason "error"; the message says whether the engine is usable.
          KeyboardInterrupt: nothing is lost, and the next step goes on, unless it came
            half-way through a step: then that step's requests have ended as above.
        """
        self._check_usable()
        if self._call() is not None:
            raise EngineError("`Engine.step` was called from a callback of its own")
        recorder = self._loop.recorder
        started_at, waited_before = time.perf_counter(), recorder.wait_seconds
        call = _Call()
        try:
            self._call = weakref.ref(call)
            if not self._loop.is_whole:  # one interrupt came while another was handled
                self._drop_steps(KeyboardInterrupt())
            self._loop.turn()
        except jax.errors.JaxRuntimeError as error:
            self._fail_steps(error)
        except BaseException as error:
            if not self._loop.is_whole:
                self._drop_steps(error)
            raise
        finally:
            del call  # not when the frame goes, which a traceback may keep
            waited = self._loop.recorder.wait_seconds - waited_before
            self._loop.recorder.host_seconds += (
                time.perf_counter() - started_at - waited
            )
        return not self.is_idle

    def measure(
        self, bucket: Bucket, context_length: int, *, num_steps: int = 8
    ) -> float:
        """Seconds of a round of this shape, from `num_steps` steps in a row.

        All its requests have `context_length` tokens (in pages that they share, if the
        pool is small) and all its rows are used. The engine must be idle. Call
        `warm_up` first, or the time to compile is measured.
        """
        self._check_usable()
        checks.check_int("context_length", context_length, 1)
        if not self.is_idle:
            raise EngineError("`Engine.measure` needs an idle engine")
        if bucket not in self.buckets:
            raise ValueError(f"`bucket` must be one of {self.buckets}, got {bucket}")
        most = self.max_measured_context(num_steps)
        if not 1 <= context_length <= most:
            raise ValueError(
                f"`context_length` must lie in 1..{most}, so that {num_steps} steps "
                f"fit, got {context_length}"
            )
        try:
            return self._loop.runner.measure(bucket, context_length, num_steps)
        except jax.errors.JaxRuntimeError as error:
            self._fail_steps(error)

    def max_measured_context(self, num_steps: int = 8) -> int:
        """The longest context that leaves `measure` room for `num_steps` steps.

        Raises:
          ValueError: there is none.
        """
        rounds = (1 + num_steps) * self.config.rounds_per_step  # one leads in
        most = self.config.max_length - rounds * (1 + self.draft_length)
        if num_steps < 1 or most < 1:
            raise ValueError(
                f"`num_steps` must be at least 1 and fit max_length = "
                f"{self.config.max_length}, got {num_steps}"
            )
        return most

    def metrics(self, *, reset: bool = False) -> dict[str, Any]:
        """Counts, times and calibration since the last reset, as plain numbers.

        Keys: the engine (`mode`, `num_programs`), the queue (`num_waiting`,
        `num_running`, `num_free_pages`), requests (`num_finished` by reason,
        `num_preemptions`, `num_tokens`), the drafter's context (`num_catch_ups`: calls,
        `num_caught_up`: tokens), speculation (`num_rounds`, `accepted_length`,
        `acceptance`, `mean_verify_length`, `verify_length_counts`), `calibration`
        (confidence against acceptance of the reached slots; `drift` > 0: the drafter
        promises too much), `steps` by program (times, predicted times, utilisation of
        requests and rows), `cost_drift` (how far real steps are from the table; None
        where costs do not follow them), and the host (`host_seconds`, `wait_seconds`
        for the device, `host_share` of both, `num_dispatches`, `starved_share` of them
        that found the device without work).
        """
        report = self._loop.recorder.report(
            mode=self.config.mode,
            num_waiting=len(self._loop.slots.queue),
            num_running=len(self._loop.slots.running),
            num_free_pages=self._loop.slots.pages.num_free,
            num_programs=self.num_programs,
            cost_drift=self._loop.planner.cost_drift(),
        )
        if reset:
            self._loop.recorder.reset()
        return report

    def _cancel(self, request: RequestHandle) -> bool:
        if request.is_done:
            return False
        with self._loop.changing():
            self._loop.finish(request, "cancelled")
        return True

    def _check_usable(self) -> None:
        if self._failure is not None:
            raise EngineError(
                f"the engine is not usable any more after: {self._failure}"
            ) from self._failure

    def _drop_steps(self, error: BaseException) -> int:
        """Ends the requests of steps under way and keeps the others; returns how many.

        `_failure` is set if the device cannot hold an empty state either.
        """
        num_failed = self._loop.drop_steps(error)
        try:
            self._loop.runner.reset()
        except jax.errors.JaxRuntimeError as again:
            self._failure = again
        self._loop.is_whole = True
        return num_failed

    def _fail_steps(self, error: jax.errors.JaxRuntimeError) -> NoReturn:
        """`_drop_steps`, and says so."""
        num_failed = self._drop_steps(error)
        usable = "usable" if self._failure is None else "not usable"
        raise EngineError(
            f"a step failed on the device and ended {num_failed} requests; the engine "
            f"is {usable}: {error}"
        ) from error


def warm_up(engines: Sequence[Engine]) -> float:
    """Warms up several engines; returns seconds.

    Their programs compile side by side, and those that engines share (prefill, say, of
    equal shapes in different modes) once.
    """
    started_at = time.perf_counter()
    for engine in engines:
        engine._check_usable()
    compile_programs([(engine._loop.runner, engine.buckets) for engine in engines])
    for engine in engines:
        engine.warm_up()
    return time.perf_counter() - started_at
