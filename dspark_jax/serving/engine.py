"""The serving engine: a host loop that keeps one step ahead of the device.

Every call of `Engine.step` admits requests, feeds a piece of their prompts, dispatches
a round for all that decode, and then reads what the step before it did, while the
device runs this one. The host therefore plans from what it knew a step ago: budgets
come from confidences two rounds old, which is also what keeps them lossless; who gets
the budget is decided inside the step, from the live draft.

Pages are given out as texts grow. When there are none left the youngest request is
preempted: it loses its pages, waits, and is fed again with all it has said so far.
"""

import collections
import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.config import Speculation
from dspark_jax.decoding import arguments
from dspark_jax.sampling import Sampling
from dspark_jax.serving import admission, programs
from dspark_jax.serving.batching import (
    Bucket,
    BucketGrid,
    check_buckets,
    default_buckets,
)
from dspark_jax.serving.callbacks import CallbackGuard
from dspark_jax.serving.control import from_bits
from dspark_jax.serving.engine_config import MAX_PROGRAMS, EngineConfig
from dspark_jax.serving.metrics import Recorder, step_name
from dspark_jax.serving.pages import PageAllocator, table_of
from dspark_jax.serving.planning import Plan, RoundPlanner
from dspark_jax.serving.requests import (
    DECODING,
    DONE,
    PREFILLING,
    WAITING,
    Queue,
    QueueFullError,
    RequestHandle,
)
from dspark_jax.types import (
    FINISH_NON_FINITE,
    FINISH_REASONS,
    FINISH_STOP,
    RUNNING,
    Drafter,
    PyTree,
    Target,
)


class EngineError(RuntimeError):
    """The engine cannot go on; the message says why, and whether it is usable."""


@dataclasses.dataclass
class _Dispatched:
    """A step under way."""

    step: int
    result: jax.Array
    rows: list[tuple[int, RequestHandle]]  # (row of the result, request)
    bucket: Bucket | None  # None: prefill
    plan: Plan | None
    num_ahead: int  # tokens that each row may add at most
    context_tokens: int
    started_at: float
    num_rows: int  # prefill: rows fed


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
        admission.check_models(target, target_params, drafter, drafter_params, config)
        if config.mode == "plain":
            drafter = drafter_params = None
        length = arguments.check_models(target, drafter, options)
        if temperatures is not None and drafter is not None:
            temperatures = arguments.make_temperatures(temperatures, length)
            temperatures = temperatures[:length]
        elif drafter is None:
            temperatures = None
        buckets = config.buckets
        if buckets is None:
            buckets = default_buckets(config.mode, config.num_slots, length)
        check_buckets(buckets, config.mode, config.num_slots, length)
        if len(set(buckets)) + 1 > MAX_PROGRAMS:
            raise ValueError(
                f"buckets must make at most {MAX_PROGRAMS} programs with the one for "
                f"prefill, got {len(set(buckets)) + 1}"
            )
        self.config = config
        self.target = target
        self._spec = programs.StepSpec(
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
        self._params = programs.Params(
            target=target_params, drafter=drafter_params, temperatures=temperatures
        )
        self._grid = BucketGrid(buckets)
        self._planner = RoundPlanner(config, self._grid, length, costs)
        self._recorder = Recorder(length)
        self._queue = Queue()
        self._slots: list[RequestHandle | None] = [None] * config.num_slots
        self._pages = PageAllocator(config.total_pages)
        self._in_flight: collections.deque[_Dispatched] = collections.deque()
        self._num_submitted = 0
        self._step = 0
        self._last_ready_at = 0.0
        self._is_stepping = False
        self._failure: BaseException | None = None
        self._state = self._make_state()

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
        return not (self._queue or self._in_flight or any(self._slots))

    def warm_up(self) -> float:
        """Compiles every program by running it on padding; returns seconds."""
        self._check_usable()
        started_at = time.perf_counter()
        admission.touch(self.config, self.target)
        control = self._spec.prefill_control
        empty = np.zeros((self.config.prefill_groups, control.width), np.int32)
        empty[:, control.at("slot")] = self.config.num_slots
        self._run_prefill(empty)
        for bucket in self._grid.buckets:
            result = self._run_round(bucket, self._round_control(bucket, []), 0)
        result.block_until_ready()
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
        config = self.config
        if config.max_waiting is not None and len(self._queue) >= config.max_waiting:
            raise QueueFullError(
                f"{len(self._queue)} requests wait already, as many as "
                f"max_waiting = {config.max_waiting} allows"
            )
        request = RequestHandle(
            self,
            self._num_submitted,
            on_tokens=on_tokens,
            **admission.check_request(
                tokens,
                max_new_tokens=max_new_tokens,
                sampling=sampling,
                seed=self._num_submitted if seed is None else seed,
                stop_tokens=stop_tokens,
                target=self.target,
                config=config,
            ),
        )
        self._num_submitted += 1
        self._queue.put(request)
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
            self._step += 1
            self._admit()
            num_before = len(self._in_flight)
            self._dispatch_prefill()
            self._dispatch_round()
            has_dispatched = len(self._in_flight) > num_before
            ahead = self.config.dispatch_ahead if has_dispatched else 0
            self._collect(self._step - ahead)
        except jax.errors.JaxRuntimeError as error:
            self._fail_steps(error)
        finally:
            self._is_stepping = False
            waited = self._recorder.wait_seconds - waited_before
            self._recorder.host_seconds += time.perf_counter() - started_at - waited
        return not self.is_idle

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
            num_waiting=len(self._queue),
            num_running=sum(request is not None for request in self._slots),
            num_free_pages=self._pages.num_free,
            num_programs=self.num_programs,
            cost_drift=self._planner.cost_drift(),
        )
        if reset:
            self._recorder.reset()
        return report

    # Admission and pages.

    def _admit(self) -> None:
        """Gives slots and pages to waiting requests, in order."""
        while (request := self._queue.first()) is not None:
            if None not in self._slots:
                return
            num_running = sum(request is not None for request in self._slots)
            needed = self._pages_for(request, request._feed_length + 1)
            # A page for each that runs stays free, or the newcomer would be preempted.
            if num_running and self._pages.num_free < needed + num_running:
                return
            pages = self._pages.take(needed)
            if pages is None:
                return
            self._queue.pop()
            slot = self._slots.index(None)
            self._slots[slot] = request
            request._slot, request._pages = slot, pages
            request._status, request._num_fed, request._num_ahead = PREFILLING, 0, 0
            self._planner.assign(slot)

    def _pages_for(self, request: RequestHandle, length: int) -> int:
        return -(-min(length, request._limit) // self.config.page_size)

    def _release(self, request: RequestHandle) -> None:
        """Takes a request's slot and pages back.

        Steps under way may still write to the pages: the device runs them before any
        that is dispatched from now on.
        """
        if request._slot >= 0:
            self._slots[request._slot] = None
            self._pages.give_back(request._pages)
            request._slot = -1

    def _preempt(self, request: RequestHandle) -> None:
        """Sends a running request, none of whose steps is under way, to wait."""
        self._release(request)
        request._status = WAITING
        request.num_preemptions += 1
        self._recorder.num_preemptions += 1
        self._queue.put_back(request)

    def _finish(
        self, request: RequestHandle, reason: str, error: BaseException | None = None
    ) -> None:
        self._release(request)
        request._status = DONE
        request.finish_reason = reason
        request.error = error
        request.finished_at = time.perf_counter()
        self._recorder.num_finished[reason] += 1

    def _cancel(self, request: RequestHandle) -> bool:
        if request.is_done:
            return False
        if request._status == WAITING:
            self._queue.remove(request)
        self._finish(request, "cancelled")
        return True

    # Dispatch.

    def _dispatch_prefill(self) -> None:
        """Feeds the next pieces of the oldest prompts that are not fed yet."""
        waiting = [r for r in self._slots if r is not None and r._status == PREFILLING]
        if not waiting:
            return
        waiting.sort(key=lambda request: request.request_id)
        groups, chunk = self.config.prefill_groups, self.config.chunk
        columns = self._spec.prefill_control
        control = np.zeros((groups, columns.width), np.int32)
        control[:, columns.at("slot")] = self.config.num_slots
        row, num_fed, drawing = 0, 0, []
        for request in waiting:
            while row < groups and request._status == PREFILLING:
                count = min(chunk, request._feed_length - request._num_fed)
                is_last = request._num_fed + count == request._feed_length
                draws = is_last and not request.tokens
                self._fill_piece(control[row], request, count, draws)
                request._num_fed += count
                num_fed += count
                if is_last:
                    request._status = DECODING
                if draws:
                    request._num_ahead += 1
                    drawing.append((row, request))
                row += 1
        started_at = self._before_dispatch()
        result = self._run_prefill(control)
        self._in_flight.append(
            _Dispatched(
                step=self._step,
                result=result,
                rows=drawing,
                bucket=None,
                plan=None,
                num_ahead=1,
                context_tokens=0,
                started_at=started_at,
                num_rows=num_fed,
            )
        )

    def _fill_piece(
        self, row: np.ndarray, request: RequestHandle, count: int, draws: bool
    ) -> None:
        columns = self._spec.prefill_control
        known, first = request._known, request._num_fed
        values = {
            "slot": request._slot,
            "draws": draws,
            "first": first,
            "count": count,
            "length": len(known),
            "limit": request._limit,
            "anchor": known[-1],
            "key": request._key,
            "stop_tokens": request._stop_tokens,
            "table": table_of(request._pages, self.config.pages_per_slot),
            **request._settings,
        }
        for name, value in values.items():
            row[columns.at(name)] = value
        start = columns.at("tokens").start
        row[start : start + count] = known[first : first + count]

    def _dispatch_round(self) -> None:
        """One round for all that decode, with pages for what they may add."""
        advance = self.config.rounds_per_step * (1 + self._spec.draft_length)
        while True:
            rows = [r for r in self._slots if r is not None and r._status == DECODING]
            # Steps under way add a token each at least: these end with them.
            rows = [r for r in rows if r._length + self._num_steps(r) < r._limit]
            if not rows:
                return
            rows.sort(key=lambda request: request.request_id)
            if self._reserve(rows, advance):
                break
        bucket, plan = self._planner.plan(
            self._step,
            [request._slot for request in rows],
            np.array([request._length for request in rows]),
            np.array([request._limit for request in rows]),
        )
        control = self._round_control(bucket, rows)
        started_at = self._before_dispatch()
        result = self._run_round(bucket, control, plan.num_drafts)
        rounds = self.config.rounds_per_step
        num_ahead = rounds * (1 if bucket.is_plain else 1 + self._spec.draft_length)
        for request in rows:
            request._num_ahead += num_ahead
        self._in_flight.append(
            _Dispatched(
                step=self._step,
                result=result,
                rows=list(enumerate(rows)),
                bucket=bucket,
                plan=plan,
                num_ahead=num_ahead,
                context_tokens=plan.context_tokens,
                started_at=started_at,
                num_rows=0,
            )
        )

    def _num_steps(self, request: RequestHandle) -> int:
        """Tokens that the steps under way add to a request at least, if it runs on."""
        rounds = self.config.rounds_per_step
        return sum(
            1 if step.bucket is None else rounds
            for step in self._in_flight
            if any(other is request for _, other in step.rows)
        )

    def _reserve(self, rows: list[RequestHandle], advance: int) -> bool:
        """Gives each row pages for its next step; False if the rows have changed."""
        for request in rows:
            length = request._length + request._num_ahead + advance
            missing = self._pages_for(request, length) - len(request._pages)
            if missing <= 0:
                continue
            pages = self._pages.take(missing)
            if pages is not None:
                request._pages += pages
                continue
            # What steps under way have said must be known before a request is fed
            # again: a round must never be drawn twice with the same noise.
            if self._in_flight:
                self._collect(self._step)
            else:
                running = [r for r in self._slots if r is not None]
                self._preempt(max(running, key=lambda request: request.request_id))
            return False
        return True

    def _round_control(self, bucket: Bucket, rows: list[RequestHandle]) -> np.ndarray:
        columns = self._spec.round_control
        control = np.full((bucket.requests, columns.width), -1, np.int32)
        control[:, 0] = self.config.num_slots
        for row, request in enumerate(rows):
            control[row, 0] = request._slot
            control[row, 1 : 1 + len(request._pages)] = request._pages
        return control

    def _before_dispatch(self) -> float:
        self._recorder.num_dispatches += 1
        if self._in_flight and self._in_flight[-1].result.is_ready():
            self._recorder.num_starved += 1
        return time.perf_counter()

    def _run_prefill(self, control: np.ndarray) -> jax.Array:
        self._state, result = programs.prefill_chunk(
            self._params, self._state, control, spec=self._spec
        )
        result.copy_to_host_async()
        return result

    def _run_round(
        self, bucket: Bucket, control: np.ndarray, num_drafts: int
    ) -> jax.Array:
        if bucket.is_plain:
            self._state, result = programs.plain_rounds(
                self._params, self._state, control, spec=self._spec
            )
        else:
            self._state, result = programs.speculative_rounds(
                self._params,
                self._state,
                control,
                np.int32(num_drafts),
                spec=self._spec,
                num_rows=bucket.tokens,
            )
        result.copy_to_host_async()
        return result

    # Results.

    def _collect(self, last_step: int) -> None:
        """Reads the steps under way up to `last_step`, oldest first."""
        while self._in_flight and self._in_flight[0].step <= last_step:
            step = self._in_flight[0]
            waits_from = time.perf_counter()
            result = np.asarray(step.result)
            ready_at = time.perf_counter()
            self._in_flight.popleft()
            self._recorder.wait_seconds += ready_at - waits_from
            # The device began this step when it was dispatched or had ended the last.
            seconds = ready_at - max(step.started_at, self._last_ready_at)
            self._last_ready_at = ready_at
            for _, request in step.rows:
                request._num_ahead -= step.num_ahead
            live = [
                (row, request) for row, request in step.rows if not request.is_done
            ]
            num_fed = step.num_rows
            if step.bucket is None or step.bucket.is_plain:
                columns = self._spec.plain_result
                if step.bucket is not None:
                    num_fed = len(step.rows)
            else:
                columns = self._spec.round_result
                num_fed = self._read_rounds(step, columns, result, live)
            self._record(step, seconds, num_fed)
            for row, request in live:
                self._deliver(request, columns, result[:, row])

    def _read_rounds(
        self,
        step: _Dispatched,
        columns: Any,
        result: np.ndarray,
        live: list[tuple[int, RequestHandle]],
    ) -> int:
        """Counts speculative rounds and publishes confidences; returns rows fed."""
        live_rows = [row for row, _ in live]
        slots = [request._slot for _, request in live]
        confidence = from_bits(columns.of(result, "confidence"))
        self._planner.publish(step.step, slots, confidence[-1][live_rows])
        num_fed = 0
        for index in range(result.shape[0]):
            now = result[index]
            committed = columns.one(now, "num_committed")
            finish = columns.one(now, "finish")
            is_counted = (committed > 0) & (finish != FINISH_NON_FINITE)
            window = columns.one(now, "verify_length")
            accepted = columns.one(now, "num_accepted")
            ended = (finish == FINISH_STOP) & (committed <= accepted)
            accepted_sum = accepted + 1 - ended
            num_fed += int((window + 1)[committed > 0].sum())
            counted = [row for row in live_rows if is_counted[row]]
            self._recorder.add_rounds(
                window[counted],
                accepted[counted],
                accepted_sum[counted],
                confidence[index][counted],
            )
            for row, request in live:
                if is_counted[row]:
                    request.num_rounds += 1
                    request.num_verified += int(window[row])
                    request.num_accepted += int(accepted[row])
                    request.accepted_sum += int(accepted_sum[row])
        return num_fed

    def _record(self, step: _Dispatched, seconds: float, num_fed: int) -> None:
        if step.bucket is None:
            groups = self.config.prefill_groups
            self._recorder.add_step(
                "prefill",
                seconds=seconds,
                predicted=None,
                requests=(len(step.rows), groups),
                rows=(num_fed, groups * self.config.chunk),
            )
            return
        assert step.plan is not None
        rounds = self.config.rounds_per_step
        self._recorder.add_step(
            step_name(step.bucket),
            seconds=seconds,
            predicted=step.plan.seconds,
            requests=(len(step.rows), step.bucket.requests),
            rows=(num_fed, rounds * step.bucket.tokens),
        )
        self._planner.observe(step.bucket, step.context_tokens, seconds / rounds)

    def _deliver(
        self, request: RequestHandle, columns: Any, rounds: np.ndarray
    ) -> None:
        """Appends a request's new tokens [n, ..] and ends it where it ended."""
        if request.is_done:  # a callback before this one cancelled it
            return
        new: list[int] = []
        finish = RUNNING
        for now in rounds:
            count = int(columns.one(now, "num_committed"))
            new += columns.of(now, "tokens")[:count].tolist()
            finish = int(columns.one(now, "finish"))
        if new:
            request.tokens += new
            self._recorder.num_tokens += len(new)
            if request.first_token_at is None:
                request.first_token_at = time.perf_counter()
        if finish != RUNNING:
            self._finish(request, FINISH_REASONS[finish])
        if new and request._on_tokens is not None:
            with CallbackGuard() as guard:
                request._on_tokens(new)
            if guard.error is not None:
                if not request.is_done:
                    self._finish(request, "error", guard.error)
                else:
                    request.error = guard.error

    # Faults.

    def _check_usable(self) -> None:
        if self._failure is not None:
            raise EngineError(
                f"the engine is not usable any more after: {self._failure}"
            ) from self._failure

    def _fail_steps(self, error: jax.errors.JaxRuntimeError) -> None:
        """Ends the requests of failed steps, keeps the others, and says so."""
        failed = {id(r): r for step in self._in_flight for _, r in step.rows}
        for request in self._slots:
            if request is not None and request._status != PREFILLING:
                failed[id(request)] = request
        self._in_flight.clear()
        for request in failed.values():
            if not request.is_done:
                self._finish(request, "error", error)
        # The others lost their caches with the failed step: they are fed again.
        for request in list(self._slots):
            if request is not None:
                self._preempt(request)
        usable = "usable"
        try:
            self._state = None
            self._state = self._make_state()
        except jax.errors.JaxRuntimeError as again:
            self._failure, usable = again, "not usable"
        raise EngineError(
            f"a step failed on the device and ended {len(failed)} requests; the "
            f"engine is {usable}: {error}"
        ) from error

    def _make_state(self) -> Any:
        config = self.config
        return programs.make_state(
            self._spec,
            config.num_slots,
            config.max_length,
            config.total_pages,
            config.page_size,
        )
