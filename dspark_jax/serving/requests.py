"""A request: what was asked, where it stands, and the handle its owner holds."""

import collections
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from dspark_jax.serving.engine import Engine

WAITING, PREFILLING, DECODING, DONE = "waiting", "prefilling", "decoding", "done"


class QueueFullError(RuntimeError):
    """As many requests wait as `EngineConfig.max_waiting` allows."""


class RequestHandle:
    """A request in an engine: its words so far, and how it ended.

    Attributes:
      request_id: counts up from 0 in the order of `submit`.
      tokens: new tokens so far (a committed stop token is kept).
      finish_reason: None while it lives; "stop", "length", "non_finite" (the target's
        logits were NaN or infinite), "cancelled", or "error" (see `error`).
      error: what its callback raised, or the device's error.
      num_rounds, num_verified, num_accepted: of its speculative rounds.
      accepted_sum: accepted + 1 a round, + 0 if a stop ended it: τ's numerator.
      num_preemptions: how often it lost its pages and was fed again.
      submitted_at, first_token_at, finished_at: `time.perf_counter` seconds, or None.
    """

    def __init__(
        self,
        engine: "Engine",
        request_id: int,
        prompt: Sequence[int],
        limit: int,
        key: np.ndarray,
        settings: dict[str, int],
        stop_tokens: Sequence[int],
        on_tokens: Callable[[list[int]], None] | None,
    ):
        self.request_id = request_id
        self.prompt_length = len(prompt)
        self.tokens: list[int] = []
        self.finish_reason: str | None = None
        self.error: BaseException | None = None
        self.num_rounds = 0
        self.num_verified = 0
        self.num_accepted = 0
        self.accepted_sum = 0
        self.num_preemptions = 0
        self.submitted_at = time.perf_counter()
        self.first_token_at: float | None = None
        self.finished_at: float | None = None
        self._engine = engine
        self._prompt = list(prompt)
        self._limit = limit
        self._key = key
        self._settings = settings
        self._stop_tokens = list(stop_tokens)
        self._on_tokens = on_tokens
        # The engine's bookkeeping.
        self._status = WAITING
        self._slot = -1
        self._pages: list[int] = []
        self._num_fed = 0  # positions whose feeding was dispatched
        self._num_ahead = 0  # tokens that steps under way may add at most
        self._least_ahead = 0  # and at least, if it runs on
        self._num_deferred = 0  # its last tokens that the drafter has not seen
        self._has_failed = False  # a step that fed it did, and it was kept

    def __repr__(self) -> str:
        state = self.finish_reason or self._status
        return (
            f"RequestHandle({self.request_id}, {state}, {self.prompt_length} + "
            f"{len(self.tokens)} tokens)"
        )

    @property
    def is_done(self) -> bool:
        """Whether it has ended, however."""
        return self.finish_reason is not None

    @property
    def accepted_length(self) -> float:
        """τ of this request; 0 before its first round."""
        return self.accepted_sum / self.num_rounds if self.num_rounds else 0.0

    def cancel(self) -> bool:
        """Ends the request; its words so far stay. False if it had ended already."""
        return self._engine._cancel(self)

    def stream(self) -> Iterator[int]:
        """Yields new tokens, running the engine's steps while there are none.

        Raises:
          EngineError: the engine failed; see `finish_reason` for other endings.
        """
        sent = 0
        while True:
            while sent < len(self.tokens):
                yield self.tokens[sent]
                sent += 1
            if self.is_done:
                return
            self._engine.step()

    @property
    def _known(self) -> list[int]:
        return self._prompt + self.tokens

    @property
    def _length(self) -> int:
        return len(self._prompt) + len(self.tokens)

    @property
    def _feed_length(self) -> int:
        """Positions to feed before decoding: all, or all but the anchor on a resume."""
        return len(self._prompt) if not self.tokens else self._length - 1


@dataclasses.dataclass(frozen=True)
class Piece:
    """A piece of a prompt: `count` tokens from position `first` on."""

    request: RequestHandle
    first: int
    count: int
    draws: bool  # the prompt ends here, and the next token is drawn


class Queue:
    """Waiting requests: first come, first served; preempted ones come first."""

    def __init__(self) -> None:
        self._waiting: collections.deque[RequestHandle] = collections.deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, request: RequestHandle) -> None:
        self._waiting.append(request)

    def put_back(self, request: RequestHandle) -> None:
        """Returns a preempted request: before all that came after it."""
        place = 0
        for other in self._waiting:
            if other.request_id > request.request_id:
                break
            place += 1
        self._waiting.insert(place, request)

    def first(self) -> RequestHandle | None:
        return self._waiting[0] if self._waiting else None

    def pop(self) -> RequestHandle:
        return self._waiting.popleft()

    def remove(self, request: RequestHandle) -> None:
        self._waiting.remove(request)
