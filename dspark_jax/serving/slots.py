"""Who runs and who waits: slots, their pages, and preemption.

Requests run in the order they came. Pages are given out as texts grow; when there are
none left, the youngest request that runs goes back to wait, with all it has said.
"""

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
        self._page_size = config.page_size
        self._slots: list[RequestHandle | None] = [None] * config.num_slots
        self.pages = PageAllocator(config.total_pages)
        self.queue = Queue()

    @property
    def running(self) -> list[RequestHandle]:
        """Requests with a slot, oldest first."""
        return sorted(
            (request for request in self._slots if request is not None),
            key=lambda request: request.request_id,
        )

    @property
    def prefilling(self) -> list[RequestHandle]:
        """Requests whose prompts are not fed yet, oldest first."""
        return [r for r in self.running if r._status == PREFILLING]

    @property
    def decoding(self) -> list[RequestHandle]:
        """Requests that a round can go on with, oldest first.

        Steps under way add at least a token each: a request that these end is left out.
        """
        return [
            r
            for r in self.running
            if r._status == DECODING and r._length + r._least_ahead < r._limit
        ]

    def admit(self) -> list[int]:
        """Gives slots and pages to waiting requests; returns the slots."""
        admitted = []
        while (request := self.queue.first()) is not None and None in self._slots:
            needed = self._pages_for(request, request._feed_length + 1)
            if self.pages.num_free < needed + self._spare(request, needed):
                break
            slot = self._slots.index(None)
            self._slots[slot] = self.queue.pop()
            request._slot = slot
            request._pages = self.pages.take(needed) or []
            request._status, request._num_fed = PREFILLING, 0
            request._num_deferred = 0  # feeding shows the drafter all
            admitted.append(slot)
        return admitted

    def reserve(self, request: RequestHandle, advance: int) -> bool:
        """Pages for what steps under way and `advance` more tokens may need."""
        length = request._length + request._num_ahead + advance
        missing = self._pages_for(request, length) - len(request._pages)
        if missing > 0:
            pages = self.pages.take(missing)
            if pages is None:
                return False
            request._pages += pages
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

    def _pages_for(self, request: RequestHandle, length: int) -> int:
        return -(-min(length, request._limit) // self._page_size)

    def _spare(self, newcomer: RequestHandle, needed: int) -> int:
        """Pages that stay free, or the newcomer would soon be preempted.

        One for each that still grows, and an eighth of what all may grow by: where
        pages are small, one is a few tokens. (In a model of a tight pool with pages of
        4 that spares a third of the feeding, for 3 % more rounds; a quarter spares
        little more, for 10 %. With pages of 16 one for each is more than an eighth.)
        """
        growths = [
            self._pages_for(other, other._limit) - len(other._pages)
            for other in self.running
        ]
        num_growing = sum(growth > 0 for growth in growths)
        own = self._pages_for(newcomer, newcomer._limit) - needed
        return max(num_growing, -(-(sum(growths) + own) // _SPARED))

    def _release(self, request: RequestHandle) -> None:
        if request._slot >= 0:
            self._slots[request._slot] = None
            self.pages.give_back(request._pages)
            request._slot = -1
