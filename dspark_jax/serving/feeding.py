"""What a prefill step feeds, and when there is one.

A round takes as long with empty rows as with full ones, and every prompt has to be fed
at some time: whoever decodes then waits for it. So prompts are fed before the next
round, oldest first, step after step until none is left. Two things bound that.

* Words of requests that decode must not stall for long: while any does, there are at
  most `EngineConfig.max_prefill_steps` between two rounds.
* A prefill step takes as long with padding as with pieces. One that would have room
  left is put off while eight times as many requests decode as wait to be fed, for
  `EngineConfig.max_prefill_delay` rounds at most: a few late first words against a
  pause for many, and the prompts that come meanwhile share the step.
"""

from dspark_jax.serving.engine_config import EngineConfig
from dspark_jax.serving.requests import DECODING, PREFILLING, Piece, RequestHandle
from dspark_jax.serving.slots import SlotTable

_MANY = 8  # times as many: for these, a step with room left is put off


class Feeder:
    """Chooses the pieces of prefill steps, and knows how long some were put off."""

    def __init__(self, config: EngineConfig, slots: SlotTable):
        self._config = config
        self._slots = slots
        self._num_rounds_put_off = 0

    def next_pieces(self, num_steps: int) -> list[Piece]:
        """Pieces of the next prefill step, oldest first; none: it is a round's turn.

        They count as fed from now on.

        Args:
          num_steps: prefill steps since the last round.
        """
        waiting = self._slots.prefilling
        if not waiting:
            self._num_rounds_put_off = 0
            return []
        if num_steps >= self._config.max_prefill_steps and self._slots.decoding:
            return []
        if self._is_put_off(waiting):
            self._num_rounds_put_off += self._config.rounds_per_step
            return []
        self._num_rounds_put_off = 0
        return self._take(waiting)

    def _is_put_off(self, waiting: list[RequestHandle]) -> bool:
        chunk = self._config.chunk
        num_pieces = sum(-(-(r._feed_length - r._num_fed) // chunk) for r in waiting)
        delay = self._num_rounds_put_off + self._config.rounds_per_step
        return (
            num_pieces < self._config.prefill_groups
            and delay <= self._config.max_prefill_delay
            and len(waiting) * _MANY <= len(self._slots.decoding)
        )

    def _take(self, waiting: list[RequestHandle]) -> list[Piece]:
        pieces: list[Piece] = []
        for request in waiting:
            while (
                request._status == PREFILLING
                and len(pieces) < self._config.prefill_groups
            ):
                first, end = request._num_fed, request._feed_length
                count = min(self._config.chunk, end - first)
                request._num_fed += count
                if request._num_fed == end:
                    request._status = DECODING
                draws = request._num_fed == end and not request.tokens
                pieces.append(Piece(request, first, count, draws))
        return pieces
