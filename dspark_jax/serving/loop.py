"""One turn of the host: admit, dispatch, and read what an earlier step did.

A step's result is read after the next step is on its way. Until then the host counts
what the step may add to each request (for pages) and what it will add at least (so that
no row is spent on a request that is certain to have ended).
"""

import collections
import contextlib
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from dspark_jax.serving import results
from dspark_jax.serving.callbacks import CallbackGuard
from dspark_jax.serving.engine_config import EngineConfig
from dspark_jax.serving.feeding import Feeder
from dspark_jax.serving.metrics import Recorder
from dspark_jax.serving.planning import RoundPlanner
from dspark_jax.serving.requests import DECODING, PREFILLING, Piece, RequestHandle
from dspark_jax.serving.results import DispatchedStep
from dspark_jax.serving.runner import CATCH_UP, ProgramName, StepRunner
from dspark_jax.serving.slots import SlotTable
from dspark_jax.serving.upkeep import Upkeep
from dspark_jax.types import FINISH_REASONS, RUNNING


class StepLoop:
    """Slots, steps under way, and what turns the ones into the others."""

    def __init__(
        self,
        config: EngineConfig,
        runner: StepRunner,
        planner: RoundPlanner,
        recorder: Recorder,
    ):
        self._config = config
        self._spec = runner.spec
        self.runner = runner
        self.planner = planner
        self.recorder = recorder
        self.slots = SlotTable(config)
        self._feeder = Feeder(config, self.slots)
        self._upkeep = Upkeep(config, defers=runner.defers)
        self.in_flight: collections.deque[DispatchedStep] = collections.deque()
        self.step_number = 0
        # Whether the books are complete: an interrupt then loses nothing.
        self.is_whole = True
        self._interrupt: BaseException | None = None
        self._last_ready_at = 0.0

    def turn(self) -> None:
        """Dispatches a step, and reads those that it leaves behind."""
        with self.changing():
            self.step_number += 1
            for slot in self.slots.admit():
                self.planner.assign(slot)
            has_fed = self._feed()
            has_dispatched = self._dispatch_round() or has_fed
            ahead = self._config.dispatch_ahead if has_dispatched else 0
            self._collect(self.step_number - ahead)

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """While the books change; what interrupts that leaves `is_whole` False."""
        before, self.is_whole = self.is_whole, False
        yield
        self.is_whole = before

    def finish(
        self, request: RequestHandle, reason: str, error: BaseException | None = None
    ) -> None:
        """Ends a request."""
        self._conclude(request, reason, error)
        self.slots.remove(request)

    def _conclude(
        self, request: RequestHandle, reason: str, error: BaseException | None
    ) -> None:
        """Says how a request ended."""
        request.error = error or request.error
        request.finished_at = time.perf_counter()
        request.finish_reason = reason
        self.recorder.num_finished[reason] += 1

    def drop_steps(self, error: BaseException) -> int:
        """Ends the requests of failed steps; returns how many.

        The others that run lost what was fed to them: they wait, to be fed again, but
        only once: one that feeding fails for again may be what it fails for. Whatever
        an interrupt left of the books, they are right afterwards; `is_whole` again,
        says the caller, when the device's state is, too.
        """
        self.is_whole = False
        self.in_flight.clear()
        self._interrupt = None
        num_failed = 0
        for request in self.slots.alive:
            is_fed = request._status == PREFILLING and request._num_fed > 0
            if request._status == DECODING or (is_fed and request._has_failed):
                self._conclude(request, "error", error)
                num_failed += 1
            request._has_failed |= is_fed
        self.slots.start_over()
        return num_failed

    def _feed(self) -> bool:
        """Prefill steps for the prompts that wait; whether there was one."""
        num_steps = 0
        while pieces := self._feeder.next_pieces(num_steps):
            self._dispatch_prefill(pieces)
            num_steps += 1
        return num_steps > 0

    def _dispatch_prefill(self, pieces: list[Piece]) -> None:
        """One prefill step."""
        num_pieces = self.runner.prefill_size(len(pieces))
        started_at = self._before_dispatch(num_pieces)
        step = DispatchedStep(
            number=self.step_number,
            result=self.runner.prefill(pieces),
            rows=[(row, p.request) for row, p in enumerate(pieces) if p.draws],
            most_ahead=1,
            least_ahead=1,
            started_at=started_at,
            num_fed=sum(piece.count for piece in pieces),
            num_pieces=num_pieces,
            num_filled=len(pieces),
        )
        step.begin()
        self.in_flight.append(step)

    def _dispatch_round(self) -> bool:
        """One round for all that decode, with pages for what they may add."""
        rounds, width = self._config.rounds_per_step, 1 + self._spec.draft_length
        requests = self._reserve(rounds * width)
        if not requests:
            return False
        slots = [request._slot for request in requests]
        catch_ups = self._upkeep.due(requests, is_drafting=True)
        bucket, plan = self.planner.plan(
            self.step_number,
            slots,
            np.array([request._length for request in requests]),
            np.array([request._limit for request in requests]),
            self._upkeep_seconds(len(catch_ups)) / rounds,
        )
        if bucket.is_plain:
            catch_ups = self._upkeep.due(requests, is_drafting=False)
        names = [bucket, CATCH_UP] if catch_ups else [bucket]
        is_known = self.runner.known_programs.issuperset(names)
        is_priced = not catch_ups or self.runner.catch_up_seconds is not None
        started_at = self._before_dispatch(*names)
        for of_call in catch_ups:
            self._catch_up(of_call)
        step = DispatchedStep(
            number=self.step_number,
            result=self.runner.round(
                bucket, slots, self.slots.tables(slots), plan.num_drafts
            ),
            rows=list(enumerate(requests)),
            most_ahead=rounds * (1 if bucket.is_plain else width),
            least_ahead=rounds,
            started_at=started_at,
            bucket=bucket,
            plan=plan,
            is_timed=is_known and is_priced,
            upkeep_seconds=self._upkeep_seconds(len(catch_ups)),
        )
        if bucket.is_plain:
            self._upkeep.count_plain(requests)
        step.begin()
        self.in_flight.append(step)
        return True

    def _catch_up(self, requests: list[RequestHandle]) -> None:
        """Shows the drafter what plain rounds fed of these, in one call."""
        slots = [request._slot for request in requests]
        counts = [request._num_deferred for request in requests]
        self.runner.catch_up(slots, self.slots.tables(slots), counts)
        self.recorder.num_caught_up += self._upkeep.count_caught_up(requests)
        self.recorder.num_catch_ups += 1

    def _upkeep_seconds(self, num_calls: int) -> float:
        """Of so many catch-ups; 0 while nothing is known of them."""
        return num_calls * (self.runner.catch_up_seconds or 0.0)

    def _reserve(self, advance: int) -> list[RequestHandle]:
        """All that decode, each with pages for its next step."""
        while True:
            requests = self.slots.decoding
            if all(self.slots.reserve(request, advance) for request in requests):
                return requests
            # What steps under way have said must be known before a request is fed
            # again: a round must never be drawn twice with the same noise.
            if self.in_flight:
                self._collect(self.step_number)
            else:
                self.slots.preempt(self.slots.running[-1])
                self.recorder.num_preemptions += 1

    def _before_dispatch(self, *names: ProgramName) -> float:
        if not self.runner.known_programs.issuperset(names):  # one is to be compiled
            for step in self.in_flight:
                step.is_timed = False
        is_starved = self.in_flight and results.is_ready(self.in_flight[-1].result)
        self.recorder.num_dispatches += 1
        self.recorder.num_starved += bool(is_starved)
        return time.perf_counter()

    def _collect(self, last_step: int) -> None:
        """Reads the steps under way up to `last_step`, oldest first."""
        is_after = False  # whether another was read in this call
        is_seen = True  # whether the end of the step before was seen, by waiting for it
        while self.in_flight and self.in_flight[0].number <= last_step:
            step = self.in_flight[0]
            waits_from = time.perf_counter()
            is_late = results.is_ready(step.result)
            was_whole, self.is_whole = self.is_whole, True
            result = np.asarray(step.result)
            self.is_whole = was_whole
            ready_at = time.perf_counter()
            self.in_flight.popleft()
            step.end()
            self.recorder.wait_seconds += ready_at - waits_from
            # The device began this step when it was dispatched or had ended the last.
            seconds = ready_at - max(step.started_at, self._last_ready_at)
            if step.upkeep_seconds >= seconds:  # cannot be: its price is off
                step.is_timed, step.upkeep_seconds = False, 0.0
            seconds -= step.upkeep_seconds
            self._last_ready_at = ready_at
            # Of those that had ended before the host came, the first took the time
            # since the last call; how long the others took, nobody knows.
            step.is_timed &= is_seen and not (is_late and is_after)
            is_seen, is_after = not is_late, True
            columns = results.columns_of(step, self._spec)
            live = [(row, r) for row, r in step.rows if not r.is_done]
            if step.bucket is not None and not step.bucket.is_plain:
                step.num_fed = self._count_rounds(step, columns, result, live)
            elif step.bucket is not None:
                step.num_fed = len(step.rows) * self._config.rounds_per_step
            self.recorder.add_step(step, self._config, seconds)
            if step.is_timed and step.bucket is not None and step.plan is not None:
                seconds /= self._config.rounds_per_step
                context = step.plan.context_tokens
                self.planner.observe(step.bucket, context, seconds)
            rows = results.new_tokens(result, columns)
            for row, request in live:
                self._deliver(request, *rows[row])
            if self._interrupt is not None:
                interrupt, self._interrupt = self._interrupt, None
                self.is_whole = True
                raise interrupt

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
            self.recorder.add_rounds(counts, [row for row, _ in counted])
            for row, request in counted:
                counts.add_to(request, row)
            num_fed += counts.num_fed
        self.planner.publish(
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
            self.recorder.num_tokens += len(new)
            if request.first_token_at is None:
                request.first_token_at = time.perf_counter()
        if finish != RUNNING:
            self.finish(request, FINISH_REASONS[finish])
        if new and request._on_tokens is not None:
            with CallbackGuard() as guard:
                request._on_tokens(list(new))
            self._interrupt = self._interrupt or guard.interrupt
            if guard.error is not None:
                request.error = guard.error
                if not request.is_done:
                    self.finish(request, "error", guard.error)
