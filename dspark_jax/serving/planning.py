"""Which bucket a round runs in, and how many drafts it verifies.

Prices come from a cost table, promises from confidences at least two steps old
(`scheduling.relay`). Without a table every window is full.

What is compared is the rate at which rounds make words. Prompts are fed between rounds
(`feeding`) and cost a request the same whichever rounds it then takes part in: their
price is in none of the options.

A round that drafts after plain ones must first show the drafter what those fed
(`upkeep`). All of that is in its price, so that choices that are about equal do not
alternate. It cannot keep drafting out: after `probe_every` plain steps one drafts
whatever it costs, and the next, for which nothing is left to be caught up, is judged by
its own price.
"""

import dataclasses
import logging
from collections.abc import Sequence

import numpy as np

from dspark_jax.scheduling.budgets import Budget, budget
from dspark_jax.scheduling.costs import Costs
from dspark_jax.scheduling.online_costs import OnlineCosts
from dspark_jax.scheduling.relay import ConfidenceRelay
from dspark_jax.serving.batching import Bucket, BucketGrid, buckets_of
from dspark_jax.serving.engine_config import EngineConfig

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class RoundPlan:
    """What the rounds of a step were planned to be."""

    num_drafts: int
    seconds: float | None  # predicted, of one round; None without a cost table
    context_tokens: int


class RoundPlanner:
    """Plans rounds of one engine."""

    def __init__(
        self,
        config: EngineConfig,
        grid: BucketGrid,
        draft_length: int,
        costs: Costs | OnlineCosts | None,
    ):
        self._config = config
        self._grid = grid
        self._draft_length = draft_length
        self._costs: Costs | OnlineCosts | None = None
        self.use_costs(costs)
        self._since_draft = 0
        self._is_metered = config.is_metered
        self._relay = None
        if self._is_metered:
            self._relay = ConfidenceRelay(config.num_slots, draft_length)
            if costs is None:
                _logger.warning(
                    "mode %r without `costs`: every window is full", config.mode
                )
        # "cap-accept" commits what "compact" would, whose shapes it does not run.
        if config.mode == "cap-accept":
            shapes = buckets_of("compact", grid.requests, draft_length)
            grid = BucketGrid((*shapes, *grid.buckets))
        # By requests: packed tokens of the drafting shapes, and whether one is plain.
        self._sizes = {
            requests: (np.array(grid.drafting(requests)), grid.has_plain(requests))
            for requests in grid.requests
        }

    def use_costs(self, costs: Costs | OnlineCosts | None) -> None:
        """Plans by these prices from now on."""
        if costs is not None and not isinstance(costs, Costs | OnlineCosts):
            raise TypeError(
                "`costs` must be Costs or OnlineCosts (dspark_jax.scheduling), got "
                f"{type(costs).__name__}"
            )
        self._costs = costs

    def assign(self, slot: int) -> None:
        """A slot has a new request: what is known of the last one is not its."""
        if self._relay is not None:
            self._relay.assign(slot)

    def publish(self, step: int, slots: Sequence[int], confidence: np.ndarray) -> None:
        """What the drafts of `step` promised, for plans of later steps."""
        if self._relay is not None and slots:
            self._relay.publish(step, slots, confidence)

    def plan(
        self,
        step: int,
        slots: Sequence[int],
        lengths: np.ndarray,
        limits: np.ndarray,
        upkeep_seconds: float = 0.0,
    ) -> tuple[Bucket, RoundPlan]:
        """The bucket of this step and its budget.

        Args:
          step: its number.
          slots: of the requests that take part.
          lengths, limits: int [B], known tokens (of steps that were read) and limits.
          upkeep_seconds: what catch-ups add to each drafting round of this step.
        """
        rows = len(slots)
        requests = self._grid.requests_for(rows)
        context = int(lengths.sum())
        if self._config.mode == "plain":
            seconds = None
            if self._costs is not None:
                seconds = self._costs.plain_seconds(requests, context)
            return Bucket(requests, requests), RoundPlan(0, seconds, context)
        full = Bucket(requests, requests * (1 + self._draft_length))
        whole = rows * self._draft_length
        if self._costs is None:
            return full, RoundPlan(whole, None, context)
        if not self._is_metered:
            seconds = float(self._costs.seconds(requests, full.tokens, context))
            return full, RoundPlan(whole, seconds, context)
        bucket, choice = self._metered(
            step, slots, requests, full, context, limits - lengths, upkeep_seconds
        )
        seconds = choice.seconds - choice.is_drafting * upkeep_seconds
        if self._config.mode == "cap-accept":  # runs another shape than it priced
            seconds = float(self._costs.seconds(requests, full.tokens, context))
        return bucket, RoundPlan(choice.num_drafts, seconds, context)

    def observe(self, bucket: Bucket, context_tokens: int, seconds: float) -> None:
        """What a round took, for costs that follow it."""
        # "cap-accept" runs one shape; prices of the others would be left behind.
        is_followed = self._config.mode != "cap-accept"
        if is_followed and isinstance(self._costs, OnlineCosts):
            self._costs.update(
                bucket.requests,
                bucket.tokens,
                context_tokens,
                seconds,
                is_drafting=not bucket.is_plain,
            )

    def cost_drift(self) -> float | None:
        """How far real steps are from the table, where costs follow them."""
        return self._costs.drift() if isinstance(self._costs, OnlineCosts) else None

    def _metered(
        self,
        step: int,
        slots: Sequence[int],
        requests: int,
        full: Bucket,
        context: int,
        remaining: np.ndarray,
        upkeep_seconds: float,
    ) -> tuple[Bucket, Budget]:
        assert self._relay is not None
        assert self._costs is not None
        sizes, has_plain = self._sizes[requests]
        seconds = self._costs.seconds(requests, sizes, context)
        choice = budget(
            self._relay.read(step, slots),
            step=step,
            buckets=sizes,
            seconds=seconds + upkeep_seconds,
            plain_seconds=(
                self._costs.plain_seconds(requests, context) if has_plain else None
            ),
            margin=self._config.margin,
            plain_margin=self._config.plain_margin,
            must_draft=self._since_draft >= self._config.probe_every,
            max_verify_length=remaining - 1,
        )
        self._since_draft = 0 if choice.is_drafting else self._since_draft + 1
        if self._config.mode == "cap-accept":
            return full, choice
        if not choice.is_drafting:
            return Bucket(requests, requests), choice
        return Bucket(requests, choice.packed_tokens), choice
