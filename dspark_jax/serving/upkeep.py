"""The drafter's context, kept up late and for many tokens at once.

A round that drafts needs the drafter to have seen every token before it. A plain round
would have to show it one token a request, whether or not anybody drafts again, and
little is as dear a token as few rows. So plain rounds only keep what the drafter must
see (`slot_state.make_deferred`), and `programs.catch_up` shows it the tokens of many
rounds at once, before a round that drafts, or when a request's places are full. What
ends before that, or is preempted (its feeding shows all), never pays.

What the drafter has seen, position by position, is then the same. Words would not
depend on it; acceptance would.
"""

from collections.abc import Sequence

from dspark_jax.serving.engine_config import EngineConfig
from dspark_jax.serving.requests import RequestHandle


class Upkeep:
    """Whose last tokens the drafter has not seen, and when it must.

    The host knows: a request that runs got a token from every plain round, and for one
    that has ended there is no need.
    """

    def __init__(self, config: EngineConfig, *, defers: bool):
        """Nothing waits.

        Args:
          defers: whether there is a drafter, and a plain round that it does not see.
        """
        self._defers = defers
        self._num_rounds = config.rounds_per_step
        self._depth = config.deferred_depth
        self._rows = config.catch_up_rows

    def due(
        self, requests: Sequence[RequestHandle], *, is_drafting: bool
    ) -> list[list[RequestHandle]]:
        """Requests to catch up before the next round of `requests`, one list a call.

        A drafting round needs all of them; a plain one room for its tokens. Where a
        call has rows left, others come along, the fullest first.
        """
        if not self._defers:
            return []
        waiting = [r for r in requests if r._num_deferred]
        most = 0 if is_drafting else self._depth - self._num_rounds
        needed = [r for r in waiting if r._num_deferred > most]
        if not needed:
            return []
        calls: list[list[RequestHandle]] = [[]]
        room = self._rows
        for request in needed:
            if request._num_deferred > room:
                calls.append([])
                room = self._rows
            calls[-1].append(request)
            room -= request._num_deferred
        others = [r for r in waiting if r._num_deferred <= most]
        for request in sorted(others, key=lambda r: -r._num_deferred):
            if request._num_deferred <= room:
                calls[-1].append(request)
                room -= request._num_deferred
        return calls

    def count_plain(self, requests: Sequence[RequestHandle]) -> None:
        """A plain step of `requests` was dispatched."""
        if self._defers:
            for request in requests:
                request._num_deferred += self._num_rounds

    def count_caught_up(self, requests: Sequence[RequestHandle]) -> int:
        """A catch-up of `requests` was dispatched; returns how many tokens it shows."""
        count = sum(request._num_deferred for request in requests)
        for request in requests:
            request._num_deferred = 0
        return count
