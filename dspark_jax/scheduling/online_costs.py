"""Costs that follow what steps really take.

A table is measured once; clocks, neighbours and contexts change. `OnlineCosts` keeps,
for each kind of step, bucket and band of context, an exponential average of real over
predicted seconds, and multiplies the table by it. A bucket that has not run yet takes
the average of its neighbours, so that a table from a slower device does not make what
is untried look good or bad.
"""

from typing import Any

import numpy as np

from dspark_jax.scheduling.costs import Costs


class OnlineCosts:
    """A cost table and how far real steps are from it; use it in place of the table."""

    def __init__(self, costs: Costs, *, weight: float = 0.05):
        """The table as it is.

        Args:
          costs: the measured table.
          weight: of the newest step in the average, in (0, 1].
        """
        raise NotImplementedError

    def seconds(
        self, requests: int, packed_tokens: Any, context_tokens: float = 0
    ) -> np.ndarray:
        """Seconds of speculative steps, as `Costs.seconds`."""
        raise NotImplementedError

    def plain_seconds(self, requests: int, context_tokens: float = 0) -> float:
        """Seconds of a step that drafts nothing, as `Costs.plain_seconds`."""
        raise NotImplementedError

    def update(
        self,
        requests: int,
        packed_tokens: int,
        context_tokens: float,
        seconds: float,
        *,
        is_drafting: bool = True,
    ) -> None:
        """Takes in what a step of this size took."""
        raise NotImplementedError

    def drift(self) -> float:
        """Mean of |log(real / table)| over the sizes that ran; 0 before any did."""
        raise NotImplementedError
