"""Confidences on their way to the planner: late, and never a stranger's.

The host plans step t while step t - 1 still runs, so it reads what step t - 2 predicted
(paper 5.2). Being late is also what makes a global search lossless: `PastConfidence`,
the only thing that `budgets.budget` accepts, is made here and nowhere else, from rows
at least one step old. Slots are reused; a generation counter, raised whenever a slot
gets a new request, keeps a row from being read for another request than its own.
"""

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

LAG = 2
MEMORY = 2048  # rows after which 1/e of a row's part in the average is left


class PastConfidence:
    """Confidences of earlier steps, one row a request; only the relay makes it.

    Attributes:
      confidence: float64 [B, K], read-only. A request that has drafted nothing yet has
        the average of those that have, slot by slot; 1 before any has. (If it were
        always 1, new requests would be promised whole windows, and where answers are
        short a large part of the batch is new.)
      is_known: bool [B].
      origin_step: int64 [B], the step that drafted each row; -1 where not known.
      newest_step: the latest that anything here comes from, -1 if nothing does.
    """

    confidence: np.ndarray
    is_known: np.ndarray
    origin_step: np.ndarray
    newest_step: int
    __slots__ = ("confidence", "is_known", "newest_step", "origin_step")

    def __init__(self):
        raise TypeError("a PastConfidence is made by ConfidenceRelay.read only")


class ConfidenceRelay:
    """Carries each step's confidences to later steps without ever waiting for them.

    A ring of the last few steps' device arrays: `publish` puts one in while its values
    are still being computed, `read` takes those that have arrived and are old enough.
    One thread may use it.
    """

    def __init__(self, num_slots: int, draft_length: int, *, lag: int = LAG):
        """An empty relay.

        Args:
          num_slots: requests that the engine can run at once.
          draft_length: K.
          lag: steps between a draft and the first plan that may see it, at least 1.
        """
        for name, value in (
            ("num_slots", num_slots),
            ("draft_length", draft_length),
            ("lag", lag),
        ):
            if value < 1:
                raise ValueError(f"`{name}` must be at least 1, got {value}")
        self.lag = lag
        self._generation = np.zeros(num_slots, np.int64)
        self._confidence = np.ones((num_slots, draft_length))
        self._known_generation = np.full(num_slots, -1, np.int64)
        self._origin = np.full(num_slots, -1, np.int64)
        # One entry more than the lag: the oldest is the one that is read.
        self._ring: collections.deque[_Published] = collections.deque(maxlen=lag + 1)
        self._newest = -1
        self._average = np.ones(draft_length)
        self._num_averaged = 0
        self._average_step = -1

    def assign(self, slot: int) -> int:
        """Tells that `slot` has a new owner from now on; returns its generation.

        Also for a request that comes back after a preemption, or whose round is run
        again after a fault: the same round drafts the same tokens, so what is known of
        it is not past but live, and must not be read. What was published before is in
        the average of all requests from the next lag on: read nothing between a
        publication and the rerun of its own round (the engine ends such requests).
        """
        self._check_slots([slot])
        self._generation[slot] += 1
        return int(self._generation[slot])

    def publish(self, step: int, slots: Sequence[int], confidence: Any) -> None:
        """Puts in what `step` drafted, while `slots` still belong to its requests.

        Args:
          step: larger than that of the last call.
          slots: int [n], no slot twice.
          confidence: [n, K] or more rows (padding, not read), calibrated, of this
            step's drafts: a numpy array, or a device array with `is_ready()`, whose
            copy to the host the caller has started (`copy_to_host_async`).
        """
        rows = self._check_slots(slots).copy()  # the caller's array may be reused
        if step <= self._newest:
            raise ValueError(
                f"`step` must be above the last published one, {self._newest}, got "
                f"{step}"
            )
        if len(set(rows.tolist())) != len(rows):
            raise ValueError(f"`slots` must name no slot twice, got {rows.tolist()}")
        length = self._confidence.shape[1]
        shape = tuple(confidence.shape)
        if len(shape) != 2 or shape[0] < len(rows) or shape[1] != length:
            raise ValueError(
                f"`confidence` must have shape (n, K) = ({len(rows)}, {length}), or "
                f"more rows, got {shape}"
            )
        if isinstance(confidence, np.ndarray):  # and so may this one
            confidence = confidence.copy()
        self._newest = step
        generation = self._generation[rows]
        self._ring.append(_Published(step, rows, generation, confidence))

    def read(self, step: int, slots: Sequence[int]) -> PastConfidence:
        """What is known, when `step` is planned, of the requests that hold `slots`.

        Never waits: a row that has not arrived yet leaves the one before in its place,
        and a request without any is not known.
        """
        rows = self._check_slots(slots)
        self._take_arrived(step - self.lag)
        confidence, origin = self._confidence[rows], self._origin[rows]
        is_known = self._known_generation[rows] == self._generation[rows]
        is_known &= origin <= step - self.lag
        past = object.__new__(PastConfidence)
        past.newest_step = -1
        if not is_known.all():
            confidence[~is_known] = self._average
            origin[~is_known] = -1
            past.newest_step = self._average_step
        confidence.flags.writeable = False
        past.confidence = confidence
        past.is_known = is_known
        past.origin_step = origin
        past.newest_step = max(past.newest_step, int(origin.max(initial=-1)))
        return past

    def _take_arrived(self, last_step: int) -> None:
        """Moves rows of steps up to `last_step` that have arrived out of the ring."""
        waiting = []
        for entry in self._ring:
            if entry.step > last_step or not _is_ready(entry.confidence):
                waiting.append(entry)
                continue
            values = np.asarray(entry.confidence, np.float64)[: len(entry.slots)]
            values = np.where(np.isfinite(values), values, 0.0)
            values = np.minimum(np.maximum(values, 0.0), 1.0)
            is_newer = entry.step > self._origin[entry.slots]
            slots = entry.slots[is_newer]
            self._confidence[slots] = values[is_newer]
            self._known_generation[slots] = entry.generation[is_newer]
            self._origin[slots] = entry.step
            self._add_to_average(values, entry.step)
        self._ring.clear()
        self._ring.extend(waiting)

    def _add_to_average(self, values: np.ndarray, step: int) -> None:
        if not len(values):
            return
        self._num_averaged += len(values)
        # A plain mean at first, an exponential one later.
        share = max(len(values) / self._num_averaged, -np.expm1(-len(values) / MEMORY))
        mean = np.add.reduce(values) / len(values)
        self._average = self._average + share * (mean - self._average)
        self._average_step = max(self._average_step, step)

    def _check_slots(self, slots: Sequence[int]) -> np.ndarray:
        array = np.asarray(slots, np.int64)
        count = len(self._generation)
        is_flat, values = array.ndim == 1, array.tolist()
        if not is_flat or (values and not 0 <= min(values) <= max(values) < count):
            raise ValueError(f"`slots` must lie in 0..{count - 1}, got {slots!r}")
        return array


@dataclasses.dataclass(frozen=True)
class _Published:
    step: int
    slots: np.ndarray  # int64 [n]
    generation: np.ndarray  # int64 [n]
    confidence: Any  # [n or more, K]


def _is_ready(array: Any) -> bool:
    check = getattr(array, "is_ready", None)
    return True if check is None else bool(check())
