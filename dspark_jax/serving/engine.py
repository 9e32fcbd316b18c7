"""The serving engine: a host loop that keeps one step ahead of the device.

Every call of `Engine.step` admits requests, feeds a piece of their prompts, dispatches
a round for all that decode, and then reads what the step before it did, while the
device runs this one. The host therefore plans from what it knew a step ago: budgets
come from confidences two rounds old, which is also what keeps them lossless; who gets
the budget is decided inside the step, from the live draft.
"""

import collections
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from dspark_jax.config import Speculation
from dspark_jax.decoding import arguments
from dspark_jax.sampling import Sampling
from dspark_jax.serving import admission, results
from dspark_jax.serving.batching import (
    Bucket,
    BucketGrid,
    check_buckets,
    default_buckets,
)
from dspark_jax.serving.callbacks import CallbackGuard
from dspark_jax.serving.engine_config import MAX_PROGRAMS, EngineConfig
from dspark_jax.serving.metrics import Recorder
from dspark_jax.serving.planning import RoundPlanner
from dspark_jax.serving.programs import Params, StepSpec
from dspark_jax.serving.requests import (
    DECODING,
    PREFILLING,
    QueueFullError,
    RequestHandle,
)
from dspark_jax.serving.results import DispatchedStep
from dspark_jax.serving.runner import Piece, StepRunner
from dspark_jax.serving.slots import SlotTable
from dspark_jax.types import FINISH_REASONS, RUNNING, Drafter, PyTree, Target


class EngineError(RuntimeError):
    """The engine cannot go on; the message says why, and whether it is usable."""


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
        options = Speculation(
            draft_length=config.draft_length,
            rule=config.rule,
            candidates=config.candidates,
        )
        admission.check_models(target, target_params, drafter, config)
        if config.mode == "plain":
            drafter = drafter_params = temperatures = None
        length = arguments.check_models(target, drafter, options)
        if temperatures is not None:
            temperatures = arguments.make_temperatures(temperatures, length)
        buckets = config.buckets
        if buckets is None:
            buckets = default_buckets(config.mode, config.num_slots, length)
        check_buckets(buckets, config.mode, config.num_slots, length)
        self._grid = BucketGrid(buckets)
        if self.num_programs > MAX_PROGRAMS:
            raise ValueError(
                f"buckets must make at most {MAX_PROGRAMS} programs with the one for "
                f"prefill, got {self.num_programs}"
            )
        self.config = config
        self.target = target
        self._spec = StepSpec(
            target=target,
            drafter=drafter,
            options=options,
            draft_length=length,
            sampling_fields=config.sampling_fields,
            max_stop_tokens=config.max_stop_tokens,
            num_rounds=config.rounds_per_step,
            caps_commit=config.mode == "cap-accept",
            is_budgeted=config.mode in ("compact", "cap-accept"),
            chunk=config.chunk,
            pages_per_slot=config.pages_per_slot,
        )
        self._planner = RoundPlanner(config, self._grid, length, costs)
        self._recorder = Recorder(length)
        self._slots = SlotTable(config)
        self._in_flight: collections.deque[DispatchedStep] = collections.deque()
        self._num_submitted = 0
        self._step_number = 0
        self._last_ready_at = 0.0
        self._is_stepping = False
        self._failure: BaseException | None = None
        params = Params(
            target=target_params, drafter=drafter_params, temperatures=temperatures
        )
        self._runner = StepRunner(self._spec, params, config)

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        return self._grid.buckets

    @property
    def num_programs(self) -> int:
        """Programs that `warm_up` compiles."""
        return len(self._grid.buckets) + 1

    @property
    def draft_length(self) -> int:
        return self._spec.draft_length

    @property
    def is_idle(self) -> bool:
        """No request waits or runs, and no step is under way."""
        return not (self._slots.queue or self._in_flight or self._slots.running)

    def warm_up(self) -> float:
        """Compiles every program by running it on padding; returns seconds."""
        self._check_usable()
        started_at = time.perf_counter()
        admission.touch(self.config, self.target)
        self._runner.warm_up(self._grid.buckets)
        return time.perf_counter() - started_at

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
          stop_tokens: None takes the target's, () none.
          on_tokens: called with the new tokens as they come. If it raises, the request
            ends with finish_reason "error"; others go on.

        Raises:
          TypeError, ValueError: an argument breaks a rule.
          QueueFullError: `max_waiting` requests wait already.
        """
        self._check_usable()
        most = self.config.max_waiting
        if most is not None and len(self._slots.queue) >= most:
            raise QueueFullError(
                f"{len(self._slots.queue)} requests wait already, as many as "
                f"max_waiting = {most} allows"
            )
        checked = admission.check_request(
            tokens,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            seed=self._num_submitted if seed is None else seed,
            stop_tokens=stop_tokens,
            target=self.target,
            config=self.config,
        )
        request = RequestHandle(
            self, self._num_submitted, on_tokens=on_tokens, **checked
        )
        self._num_submitted += 1
        self._slots.queue.put(request)
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
        """
        self._check_usable()
        if self._is_stepping:
            raise EngineError("`Engine.step` was called from a callback of its own")
        self._is_stepping = True
        started_at = time.perf_counter()
        waited_before = self._recorder.wait_seconds
        try:
            self._step_number += 1
            for slot in self._slots.admit():
                self._planner.assign(slot)
            has_fed = self._dispatch_prefill()
            has_dispatched = self._dispatch_round() or has_fed
            ahead = self.config.dispatch_ahead if has_dispatched else 0
            self._collect(self._step_number - ahead)
        except jax.errors.JaxRuntimeError as error:
            self._fail_steps(error)
        finally:
            self._is_stepping = False
            waited = self._recorder.wait_seconds - waited_before
            self._recorder.host_seconds += time.perf_counter() - started_at - waited
        return not self.is_idle

    def measure(
        self, bucket: Bucket, context_length: int, *, num_steps: int = 8
    ) -> float:
        """Seconds of a step of this shape, from `num_steps` dispatched in a row.

        All its requests have `context_length` tokens (in pages that they share, if the
        pool is small) and all its rows are used. The engine must be idle. Call
        `warm_up` first, or the time to compile is measured.
        """
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
        return self._runner.measure(bucket, context_length, num_steps)

    def max_measured_context(self, num_steps: int = 8) -> int:
        """The longest context that leaves `measure` room for `num_steps` steps.

        Raises:
          ValueError: there is none.
        """
        rounds = num_steps * self.config.rounds_per_step
        most = self.config.max_length - rounds * (1 + self._spec.draft_length)
        if num_steps < 1 or most < 1:
            raise ValueError(
                f"`num_steps` must be at least 1 and fit max_length = "
                f"{self.config.max_length}, got {num_steps}"
            )
        return most

    def metrics(self, *, reset: bool = False) -> dict[str, Any]:
        """Counts, times and calibration since the last reset, as plain numbers.

        Keys: the queue (`num_waiting`, `num_running`, `num_free_pages`), requests
        (`num_finished` by reason, `num_preemptions`, `num_tokens`), speculation
        (`accepted_length`, `acceptance`, `mean_verify_length`,
        `verify_length_counts`), `calibration` (confidence against acceptance of the
        reached slots; `drift` > 0: the drafter promises too much), `steps` by program
        (times, predicted times, utilisation of requests and rows), and the host
        (`host_share` of the time, `starved_share` of the dispatches that found the
        device without work).
        """
        report = self._recorder.report(
            mode=self.config.mode,
            num_waiting=len(self._slots.queue),
            num_running=len(self._slots.running),
            num_free_pages=self._slots.pages.num_free,
            num_programs=self.num_programs,
            cost_drift=self._planner.cost_drift(),
        )
        if reset:
            self._recorder.reset()
        return report

    def _dispatch_prefill(self) -> bool:
        """Feeds the next pieces of the oldest prompts that are not fed yet."""
        pieces: list[Piece] = []
        for request in self._slots.prefilling:
            while (
                request._status == PREFILLING
                and len(pieces) < self.config.prefill_groups
            ):
                first, end = request._num_fed, request._feed_length
                count = min(self.config.chunk, end - first)
                request._num_fed += count
                if request._num_fed == end:
                    request._status = DECODING
                draws = request._num_fed == end and not request.tokens
                pieces.append(Piece(request, first, count, draws))
        if not pieces:
            return False
        started_at = self._before_dispatch()
        step = DispatchedStep(
            number=self._step_number,
            result=self._runner.prefill(pieces),
            rows=[(row, p.request) for row, p in enumerate(pieces) if p.draws],
            most_ahead=1,
            least_ahead=1,
            started_at=started_at,
            num_fed=sum(piece.count for piece in pieces),
        )
        step.begin()
        self._in_flight.append(step)
        return True

    def _dispatch_round(self) -> bool:
        """One round for all that decode, with pages for what they may add."""
        rounds, width = self.config.rounds_per_step, 1 + self._spec.draft_length
        while not self._reserve(rounds * width):
            pass
        requests = self._slots.decoding
        if not requests:
            return False
        bucket, plan = self._planner.plan(
            self._step_number,
            [request._slot for request in requests],
            np.array([request._length for request in requests]),
            np.array([request._limit for request in requests]),
        )
        started_at = self._before_dispatch()
        step = DispatchedStep(
            number=self._step_number,
            result=self._runner.round(bucket, requests, plan.num_drafts),
            rows=list(enumerate(requests)),
            most_ahead=rounds * (1 if bucket.is_plain else width),
            least_ahead=rounds,
            started_at=started_at,
            bucket=bucket,
            plan=plan,
        )
        step.begin()
        self._in_flight.append(step)
        return True

    def _reserve(self, advance: int) -> bool:
        """Gives all that decode pages for their next step; False: try again."""
        for request in self._slots.decoding:
            if self._slots.reserve(request, advance):
                continue
            # What steps under way have said must be known before a request is fed
            # again: a round must never be drawn twice with the same noise.
            if self._in_flight:
                self._collect(self._step_number)
            else:
                self._slots.preempt(self._slots.running[-1])
                self._recorder.num_preemptions += 1
            return False
        return True

    def _before_dispatch(self) -> float:
        is_starved = self._in_flight and results.is_ready(self._in_flight[-1].result)
        self._recorder.num_dispatches += 1
        self._recorder.num_starved += bool(is_starved)
        return time.perf_counter()

    def _collect(self, last_step: int) -> None:
        """Reads the steps under way up to `last_step`, oldest first."""
        while self._in_flight and self._in_flight[0].number <= last_step:
            step = self._in_flight[0]
            waits_from = time.perf_counter()
            result = np.asarray(step.result)
            ready_at = time.perf_counter()
            self._in_flight.popleft()
            step.end()
            self._recorder.wait_seconds += ready_at - waits_from
            # The device began this step when it was dispatched or had ended the last.
            seconds = ready_at - max(step.started_at, self._last_ready_at)
            self._last_ready_at = ready_at
            columns = results.columns_of(step, self._spec)
            live = [(row, r) for row, r in step.rows if not r.is_done]
            if step.bucket is not None and not step.bucket.is_plain:
                step.num_fed = self._count_rounds(step, columns, result, live)
            elif step.bucket is not None:
                step.num_fed = len(step.rows) * self.config.rounds_per_step
            self._recorder.add_step(step, self.config, seconds)
            if step.bucket is not None and step.plan is not None:
                seconds /= self.config.rounds_per_step
                context = step.plan.context_tokens
                self._planner.observe(step.bucket, context, seconds)
            rows = results.new_tokens(result, columns)
            for row, request in live:
                self._deliver(request, *rows[row])

    def _count_rounds(
        self,
        step: DispatchedStep,
        columns: Any,
        result: np.ndarray,
        live: list[tuple[int, RequestHandle]],
    ) -> int:
        """Counts speculative rounds and publishes confidences; returns rows fed."""
        num_fed = 0
        for now in result:
            counts = results.RoundCounts(now, columns)
            counted = [(row, r) for row, r in live if counts.is_counted[row]]
            self._recorder.add_rounds(counts, [row for row, _ in counted])
            for row, request in counted:
                counts.add_to(request, row)
            num_fed += counts.num_fed
        self._planner.publish(
            step.number,
            [request._slot for _, request in live],
            counts.confidence[[row for row, _ in live]],
        )
        return num_fed

    def _deliver(self, request: RequestHandle, new: list[int], finish: int) -> None:
        """Appends a request's new tokens and ends it where it ended."""
        if request.is_done:  # a callback before this one cancelled it
            return
        if new:
            request.tokens += new
            self._recorder.num_tokens += len(new)
            if request.first_token_at is None:
                request.first_token_at = time.perf_counter()
        if finish != RUNNING:
            self._finish(request, FINISH_REASONS[finish])
        if new and request._on_tokens is not None:
            with CallbackGuard() as guard:
                request._on_tokens(list(new))
            if guard.error is not None:
                request.error = guard.error
                if not request.is_done:
                    self._finish(request, "error", guard.error)

    def _finish(
        self, request: RequestHandle, reason: str, error: BaseException | None = None
    ) -> None:
        self._slots.remove(request)
        request.finish_reason = reason
        request.error = error or request.error
        request.finished_at = time.perf_counter()
        self._recorder.num_finished[reason] += 1

    def _cancel(self, request: RequestHandle) -> bool:
        if request.is_done:
            return False
        self._finish(request, "cancelled")
        return True

    def _check_usable(self) -> None:
        if self._failure is not None:
            raise EngineError(
                f"the engine is not usable any more after: {self._failure}"
            ) from self._failure

    def _fail_steps(self, error: jax.errors.JaxRuntimeError) -> None:
        """Ends the requests of failed steps, keeps the others, and says so."""
        failed = [r for r in self._slots.running if r._status == DECODING]
        self._in_flight.clear()
        for request in failed:
            self._finish(request, "error", error)
        # The others lost what was fed with the failed step: they are fed again.
        for request in self._slots.running:
            request._num_ahead = request._least_ahead = 0
            self._slots.preempt(request)
        usable = "usable"
        try:
            self._runner.reset()
        except jax.errors.JaxRuntimeError as again:
            self._failure, usable = again, "not usable"
        raise EngineError(
            f"a step failed on the device and ended {len(failed)} requests; the "
            f"engine is {usable}: {error}"
        ) from error
