"""Who runs and who waits: slots, their pages, and preemption.

Requests run in the order they came. Pages are given out as texts grow; when there are
none left, the youngest request that runs goes back to wait, with all it has said.

With a small model and many slots a step is over before a Python loop over requests: so
what a turn asks for several times (the order, the page tables, what all may still grow
by) is kept up to date here, change by change.
"""

import bisect
from collections.abc import Sequence

import numpy as np

from dspark_jax.serving.engine_config import EngineConfig
from dspark_jax.serving.pages import PageAllocator
from dspark_jax.serving.requests import (
    DECODING,
    DONE,
    PREFILLING,
    WAITING,
    Queue,
    RequestHandle,
)

_SPARED = 8  # one in so many pages that requests may still need


class SlotTable:
    """The slots, the pages and the queue of an engine."""

    def __init__(self, config: EngineConfig):
        self._config = config
        self._page_size = config.page_size
        self._alive: dict[int, RequestHandle] = {}  # all that wait or run
        self._clear()

    def _clear(self) -> None:
        config = self._config
        self._is_taken = [False] * config.num_slots
        self._tables = np.full((config.num_slots, config.pages_per_slot), -1, np.int32)
        self._running: list[RequestHandle] = []  # oldest first
        self._num_growing = 0  # requests that run and may still need pages
        self._growth = 0  # how many, all of them together
        self.pages = PageAllocator(config.total_pages)
        self.queue = Queue()

    @property
    def alive(self) -> list[RequestHandle]:
        """Requests that wait or run."""
        return [r for r in self._alive.values() if not r.is_done]

    @property
    def is_empty(self) -> bool:
        """Whether nobody waits or runs."""
        return all(request.is_done for request in self._alive.values())

    @property
    def running(self) -> list[RequestHandle]:
        """Requests with a slot, oldest first."""
        return list(self._running)

    @property
    def prefilling(self) -> list[RequestHandle]:
        """Requests whose prompts are not fed yet, oldest first."""
        return [r for r in self._running if r._status == PREFILLING]

    @property
    def decoding(self) -> list[RequestHandle]:
        """Requests that a round can go on with, oldest first.

        Steps under way add at least a token each: a request that these end is left out.
        """
        return [
            r
            for r in self._running
            if r._status == DECODING and r._length + r._least_ahead < r._limit
        ]

    def put(self, request: RequestHandle) -> None:
        """A new request waits."""
        self._alive[request.request_id] = request
        self.queue.put(request)

    def start_over(self) -> None:
        """All that are alive wait, with what they have said; slots are empty.

        Nothing but the list of requests is trusted: an interrupt may have come between
        any two lines of the other methods.
        """
        self._alive = {request.request_id: request for request in self.alive}
        self._clear()
        for _, request in sorted(self._alive.items()):
            request.num_preemptions += request._status != WAITING
            request._status, request._slot, request._pages = WAITING, -1, []
            request._num_ahead = request._least_ahead = 0
            self.queue.put(request)

    def admit(self) -> list[int]:
        """Gives slots and pages to waiting requests; returns the slots."""
        admitted = []
        while (request := self.queue.first()) is not None and not all(self._is_taken):
            needed = self._pages_for(request, request._feed_length + 1)
            if self.pages.num_free < needed + self._spare(request, needed):
                break
            self.queue.pop()
            slot = self._is_taken.index(False)
            self._is_taken[slot] = True
            request._slot = slot
            request._status, request._num_fed = PREFILLING, 0
            request._num_deferred = 0  # feeding shows the drafter all
            bisect.insort(self._running, request, key=lambda r: r.request_id)
            self._count_growth(request, 1)
            pages = self.pages.take(needed)
            assert pages is not None  # there were more
            self._give(request, pages)
            admitted.append(slot)
        return admitted

    def tables(self, slots: Sequence[int]) -> np.ndarray:
        """The pages of these slots, int32 [n, pages_per_slot]; -1: none there."""
        return self._tables[np.asarray(slots, np.int64)]

    def reserve(self, request: RequestHandle, advance: int) -> bool:
        """Pages for what steps under way and `advance` more tokens may need."""
        length = request._length + request._num_ahead + advance
        missing = self._pages_for(request, length) - len(request._pages)
        if missing > 0:
            pages = self.pages.take(missing)
            if pages is None:
                return False
            self._give(request, pages)
        return True

    def preempt(self, request: RequestHandle) -> None:
        """Sends a running request to wait; none of its steps may be under way."""
        self._release(request)
        request._status = WAITING
        request._num_ahead = request._least_ahead = 0
        request.num_preemptions += 1
        self.queue.put_back(request)

    def remove(self, request: RequestHandle) -> None:
        """Takes a request that ends out of its slot, or out of the queue.

        Steps under way may still write to its pages: the device runs them before any
        that is dispatched from now on.
        """
        if request._status == WAITING:
            self.queue.remove(request)
        self._release(request)
        request._status = DONE
        del self._alive[request.request_id]

    def _pages_for(self, request: RequestHandle, length: int) -> int:
        return -(-min(length, request._limit) // self._page_size)

    def _spare(self, newcomer: RequestHandle, needed: int) -> int:
        """Pages that stay free, or the newcomer would soon be preempted.

        One for each that still grows, or an eighth of what all may grow by: where
        pages are small, one is a few tokens. (In a model of a tight pool with pages of
        4 that spares a third of the feeding, for 3 % more rounds; a quarter spares
        little more, for 10 %. With pages of 16 one for each is more than an eighth.)
        """
        own = self._growth_of(newcomer) - needed
        return max(self._num_growing, -(-(self._growth + own) // _SPARED))

    def _growth_of(self, request: RequestHandle) -> int:
        """Pages that it may still need."""
        return self._pages_for(request, request._limit) - len(request._pages)

    def _count_growth(self, request: RequestHandle, sign: int) -> None:
        """Counts a running request in, or out before its pages change."""
        growth = self._growth_of(request)
        self._num_growing += sign * (growth > 0)
        self._growth += sign * growth

    def _give(self, request: RequestHandle, pages: list[int]) -> None:
        self._count_growth(request, -1)
        first = len(request._pages)
        self._tables[request._slot, first : first + len(pages)] = pages
        request._pages += pages
        self._count_growth(request, 1)

    def _release(self, request: RequestHandle) -> None:
        if request._slot >= 0:
            self._count_growth(request, -1)
            self._running.remove(request)
            self._is_taken[request._slot] = False
            self._tables[request._slot] = -1
            self.pages.give_back(request._pages)
            request._slot = -1
