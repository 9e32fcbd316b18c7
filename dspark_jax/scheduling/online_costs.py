"""Costs that follow what steps really take.

A table is measured once; clocks, neighbours and contexts change. `OnlineCosts` keeps,
for each kind of step, size and band of context, an exponential average of the logarithm
of real over predicted seconds, and multiplies the table by it. A size that has not run
takes the average over those that have, so that a table from a slower device makes
nothing that is untried look good or bad; one that ran a few times is still near it, and
one that has not run for long drifts back, so that neither a slow first step nor a bad
spell rules it out for ever.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from dspark_jax.scheduling.costs import Costs

WEIGHT = 0.05
LARGEST = 1.5  # a step further off its average than this factor counts as this far
MEMORY = 1000  # steps after which 1/e of what a size told is left


class OnlineCosts:
    """A cost table and how far real steps are from it; use it in place of the table."""

    def __init__(self, costs: Costs, *, weight: float = WEIGHT):
        """The table as it is.

        Args:
          costs: the measured table.
          weight: of the newest step in the average, in (0, 1].
        """
        if not 0 < weight <= 1:
            raise ValueError(f"`weight` must lie in (0, 1], got {weight}")
        self.costs = costs
        self.weight = weight
        self._seen: dict[_Size, dict[int, _Average]] = {}
        self._all = _Average()
        self._num_updates = 0

    def seconds(
        self, requests: int, packed_tokens: Any, context_tokens: float = 0
    ) -> np.ndarray:
        """Seconds of speculative steps, as `Costs.seconds`."""
        table = self.costs.seconds(requests, packed_tokens, context_tokens)
        sizes = np.asarray(packed_tokens)
        factors = [
            self._factor(requests, int(size), context_tokens, True)
            for size in sizes.reshape(-1)
        ]
        return np.asarray(table * np.reshape(factors, sizes.shape))

    def plain_seconds(self, requests: int, context_tokens: float = 0) -> float:
        """Seconds of a step that drafts nothing, as `Costs.plain_seconds`."""
        table = self.costs.plain_seconds(requests, context_tokens)
        return table * self._factor(requests, requests, context_tokens, False)

    def update(
        self,
        requests: int,
        packed_tokens: int,
        context_tokens: float,
        seconds: float,
        *,
        is_drafting: bool = True,
    ) -> None:
        """Takes in what a step of this size took.

        Args:
          requests, packed_tokens: as they are asked for, padding included.
          seconds: of the device, positive; steps that waited for a compilation or for
            the host are better left out.
        """
        if not 0 < seconds < float("inf"):
            raise ValueError(f"`seconds` must be positive and finite, got {seconds}")
        if is_drafting:
            table = float(self.costs.seconds(requests, packed_tokens, context_tokens))
        else:
            table = self.costs.plain_seconds(requests, context_tokens)
            packed_tokens = requests
        ratio = math.log(seconds / table)
        bands = self._seen.setdefault(_Size(requests, packed_tokens, is_drafting), {})
        self._num_updates += 1
        average = bands.setdefault(_band(context_tokens), _Average(self._all.value))
        average.add(ratio, self.weight, self._num_updates)
        self._all.add(ratio, self.weight, self._num_updates)

    def drift(self) -> float:
        """Mean of |log(real / table)| over the sizes that ran; 0 before any did."""
        values = [abs(a.value) for bands in self._seen.values() for a in bands.values()]
        return sum(values) / len(values) if values else 0.0

    def _factor(
        self,
        requests: int,
        packed_tokens: int,
        context_tokens: float,
        is_drafting: bool,
    ) -> float:
        bands = self._seen.get(_Size(requests, packed_tokens, is_drafting))
        common = self._all.value
        if not bands:
            return math.exp(common)
        here = _band(context_tokens)
        average = bands[min(bands, key=lambda band: (abs(band - here), band))]
        # As if all that it did not see had been as the others are.
        seen = 1 - (1 - self.weight) ** average.count
        kept = math.exp((average.last - self._num_updates) / MEMORY)
        return math.exp(common + seen * kept * (average.value - common))


class _Size(NamedTuple):
    requests: int
    packed_tokens: int
    is_drafting: bool


def _band(context_tokens: float) -> int:
    """Contexts within a factor of two of each other are one."""
    return int(max(context_tokens, 0)).bit_length()


class _Average:
    """Exponential average; a plain mean of the first ones."""

    def __init__(self, guess: float = 0.0):
        """None yet; the first one is held against `guess`."""
        self.value = guess
        self.count = 0
        self.last = 0  # the update that it saw last

    def add(self, ratio: float, weight: float, update: int) -> None:
        self.count += 1
        self.last = update
        largest = math.log(LARGEST)  # one slow step must not move an average far
        ratio = min(max(ratio, self.value - largest), self.value + largest)
        self.value += max(weight, 1 / self.count) * (ratio - self.value)
