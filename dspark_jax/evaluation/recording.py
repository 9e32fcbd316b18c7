"""Rounds as they were recorded, on the host: the raw material of every measure."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

PER_ROUND = (  # fields with one number a round, besides `request`
    "position",
    "num_drafted",
    "verify_length",
    "num_accepted",
    "is_ended_by_stop",
)


class Recording(NamedTuple):
    """Rounds of one drafter over some prompts, on the host: n rounds, K slots.

    Rounds stand in the order of the prompts, those of a prompt in the order they ran. A
    round in which the target was not finite is left out.
    """

    request: np.ndarray  # int32 [n], index of the prompt
    position: np.ndarray  # int32 [n], of the round's anchor
    num_drafted: np.ndarray  # int32 [n], slots that the drafter offered
    verify_length: np.ndarray  # int32 [n], drafts sent to the target
    num_accepted: np.ndarray  # int32 [n], drafts that the rule accepted
    is_ended_by_stop: np.ndarray  # bool [n], by an accepted stop token: no bonus token
    confidence_logits: np.ndarray | None  # float32 [n, K]
    new_tokens: tuple[np.ndarray, ...]  # int32 [..], of every prompt
    finish: np.ndarray  # int32 [prompts], a FINISH_* code
    draft_length: int  # K

    @property
    def num_rounds(self) -> int:
        return len(self.request)

    @property
    def accepted_sum(self) -> np.ndarray:
        """What a round adds to τ, int32 [n]: accepted, and the bonus token."""
        return self.num_accepted + np.where(self.is_ended_by_stop, 0, 1)

    @property
    def accepted_length(self) -> float:
        """τ, pooled over all rounds; NaN without any."""
        if not self.num_rounds:
            return float("nan")
        return float(self.accepted_sum.mean())

    def select(self, requests: Sequence[int]) -> "Recording":
        """The rounds of some prompts, which are numbered anew from 0."""
        number = np.full(len(self.new_tokens), -1, np.int32)
        number[list(requests)] = np.arange(len(requests), dtype=np.int32)
        order = np.argsort(number[self.request], kind="stable")
        rows = order[number[self.request][order] >= 0]
        return self._replace(
            **{name: getattr(self, name)[rows] for name in PER_ROUND},
            request=number[self.request[rows]],
            confidence_logits=None
            if self.confidence_logits is None
            else self.confidence_logits[rows],
            new_tokens=tuple(self.new_tokens[i] for i in requests),
            finish=self.finish[list(requests)],
        )


def concatenate(recordings: Sequence[Recording]) -> Recording:
    """All rounds; the prompts of the second recording follow those of the first."""
    if not recordings:
        raise ValueError("`recordings` must hold at least one recording, got 0")
    lengths = {recording.draft_length for recording in recordings}
    if len(lengths) > 1:
        raise ValueError(
            f"`recordings` must have one draft length, got {sorted(lengths)}"
        )
    sizes = [len(recording.new_tokens) for recording in recordings]
    firsts = np.cumsum([0, *sizes[:-1]])
    confidences = [recording.confidence_logits for recording in recordings]
    known = [array for array in confidences if array is not None]
    if len(known) not in (0, len(recordings)):
        raise ValueError("`recordings` must all hold confidences, or none of them")
    parts: dict[str, Any] = {
        name: np.concatenate([getattr(r, name) for r in recordings])
        for name in (*PER_ROUND, "finish")
    }
    return recordings[0]._replace(
        **parts,
        request=np.concatenate(
            [r.request + first for r, first in zip(recordings, firsts, strict=True)]
        ).astype(np.int32),
        confidence_logits=np.concatenate(known) if known else None,
        new_tokens=tuple(text for r in recordings for text in r.new_tokens),
    )
