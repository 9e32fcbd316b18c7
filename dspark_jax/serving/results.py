"""What a step did: the arrays that come back, read per request."""

import dataclasses
from typing import Any

import jax
import numpy as np

from dspark_jax.serving.batching import Bucket
from dspark_jax.serving.control import Columns, from_bits
from dspark_jax.serving.planning import RoundPlan
from dspark_jax.serving.requests import RequestHandle
from dspark_jax.serving.step_spec import StepSpec
from dspark_jax.types import FINISH_NON_FINITE, FINISH_STOP


@dataclasses.dataclass
class DispatchedStep:
    """A step under way."""

    number: int
    result: Any  # jax.Array int32 [n, rows, columns]
    rows: list[tuple[int, RequestHandle]]  # (row of the result, request)
    most_ahead: int  # tokens that it may add to each request
    least_ahead: int  # and does add, if the request runs on
    started_at: float
    bucket: Bucket | None = None  # None: prefill
    plan: RoundPlan | None = None
    num_fed: int = 0  # real rows; of a round known once it was read
    num_pieces: int = 0  # prefill: that its program takes
    num_filled: int = 0  # prefill: of these, not padding
    is_timed: bool = True  # False: what it took is not known
    upkeep_seconds: float = 0.0  # of catch-ups that were dispatched just before it

    def begin(self) -> None:
        """Counts the step into its requests' expectations."""
        for _, request in self.rows:
            request._num_ahead += self.most_ahead
            request._least_ahead += self.least_ahead

    def end(self) -> None:
        """Takes it out again, before its result counts."""
        for _, request in self.rows:
            request._num_ahead -= self.most_ahead
            request._least_ahead -= self.least_ahead


def columns_of(step: DispatchedStep, spec: StepSpec) -> Columns:
    """The columns of a step's result."""
    is_plain = step.bucket is None or step.bucket.is_plain
    return spec.plain_result if is_plain else spec.round_result


def new_tokens(result: np.ndarray, columns: Columns) -> list[tuple[list[int], int]]:
    """Per row: the tokens that all rounds [n, B, ..] committed, and the finish code."""
    counts = columns.one(result, "num_committed").tolist()
    finishes = columns.one(result, "finish")[-1].tolist()
    tokens = columns.of(result, "tokens").tolist()
    return [
        (
            [
                token
                for now, count in zip(tokens, counts, strict=True)
                for token in now[row][: count[row]]
            ],
            finish,
        )
        for row, finish in enumerate(finishes)
    ]


class RoundCounts:
    """A speculative round's counts, [B] or [B, K] each."""

    def __init__(self, result: np.ndarray, columns: Columns):
        """Reads one round [B, columns]."""
        num_committed = columns.one(result, "num_committed")
        finish = columns.one(result, "finish")
        self.verify_length = columns.one(result, "verify_length")
        self.commit_length = columns.one(result, "commit_length")
        self.num_accepted = columns.one(result, "num_accepted")
        self.confidence = from_bits(columns.of(result, "confidence"))
        # A stop token among the accepted drafts leaves no room for the next token.
        ended = (finish == FINISH_STOP) & (num_committed <= self.num_accepted)
        self.accepted_sum = self.num_accepted + 1 - ended
        self.is_counted = (num_committed > 0) & (finish != FINISH_NON_FINITE)

    @property
    def num_fed(self) -> int:
        """Rows of the target that were real."""
        return int((self.verify_length + 1)[self.is_counted].sum())

    def add_to(self, request: RequestHandle, row: int) -> None:
        """Counts the round into a request's statistics."""
        request.num_rounds += 1
        request.num_verified += int(self.verify_length[row])
        request.num_accepted += int(self.num_accepted[row])
        request.accepted_sum += int(self.accepted_sum[row])


def is_ready(result: jax.Array) -> bool:
    """Whether a result has arrived (its device has nothing left to do)."""
    return bool(result.is_ready())  # type: ignore[attr-defined]
