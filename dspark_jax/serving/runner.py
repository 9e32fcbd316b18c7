"""The device's side of an engine: its state, its programs, and what they are handed.

Calls return at once with a result that is still being computed. The state is donated
from call to call, so that the device runs them in order: what a later call writes can
never be seen by an earlier one.
"""

import concurrent.futures
import dataclasses
import os
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from dspark_jax.serving import programs, slot_state
from dspark_jax.serving.batching import Bucket
from dspark_jax.serving.engine_config import EngineConfig
from dspark_jax.serving.requests import RequestHandle
from dspark_jax.serving.step_spec import Params, StepSpec


@dataclasses.dataclass(frozen=True)
class Piece:
    """A piece of a prompt: `count` tokens from position `first` on."""

    request: RequestHandle
    first: int
    count: int
    draws: bool  # the prompt ends here, and the next token is drawn


class StepRunner:
    """Runs an engine's programs; the only holder of its device state."""

    def __init__(self, spec: StepSpec, params: Params, config: EngineConfig):
        self.spec = spec
        self._params = params
        self._config = config
        self._state: Any = None
        # Programs that have run: a bucket, or a number of pieces.
        self.known_programs: set[Bucket | int] = set()
        self.reset()

    def reset(self) -> None:
        """Empty slots and pools, whatever became of the old ones."""
        config = self._config
        self._state = None  # frees the memory first
        self._state = slot_state.make_state(
            self.spec,
            config.num_slots,
            config.max_length,
            config.total_pages,
            config.page_size,
        )

    def warm_up(self, buckets: Sequence[Bucket]) -> None:
        """Compiles every program, several at a time, and runs each on padding."""
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            # A lowered program's executable is the one that later calls find.
            sizes = self._config.prefill_sizes
            lowered = [*map(self._lower_prefill, sizes)]
            lowered += map(self._lower_round, buckets)
            list(pool.map(lambda program: program.compile(), lowered))
        for size in sizes:
            result = self._prefill(self._no_pieces(size))
        for bucket in buckets:
            result = self.round(bucket, [], 0)
        result.block_until_ready()

    def prefill(self, pieces: Sequence[Piece]) -> jax.Array:
        """Feeds pieces of prompts; row i of the result is piece i's."""
        control = self._no_pieces(self.prefill_size(len(pieces)))
        for row, piece in zip(control, pieces, strict=False):
            self._fill(row, piece)
        return self._prefill(control)

    def prefill_size(self, num_pieces: int) -> int:
        """Pieces that the program takes in which so many are fed."""
        return next(n for n in self._config.prefill_sizes if n >= num_pieces)

    def _prefill(self, control: np.ndarray) -> jax.Array:
        self._state, result = programs.prefill_chunk(
            self._params, self._state, control, spec=self.spec
        )
        self.known_programs.add(len(control))
        result.copy_to_host_async()
        return result

    def round(
        self, bucket: Bucket, requests: Sequence[RequestHandle], num_drafts: int
    ) -> jax.Array:
        """A round (or several) of `requests`, verifying at most `num_drafts` drafts."""
        columns = self.spec.round_control
        control = np.full((bucket.requests, columns.width), -1, np.int32)
        control[:, columns.at("slot")] = self._config.num_slots
        table = columns.at("table").start
        for row, request in zip(control, requests, strict=False):
            row[columns.at("slot")] = request._slot
            row[table : table + len(request._pages)] = request._pages
        return self._round(bucket, control, num_drafts)

    def measure(self, bucket: Bucket, context_length: int, num_steps: int) -> float:
        """Seconds of a round, from `num_steps` calls in a row; empties all slots."""
        columns, config = self.spec.round_control, self._config
        width = columns.at("table")
        control = np.empty((bucket.requests, columns.width), np.int32)
        slots = np.arange(bucket.requests)
        control[:, columns.at("slot")] = np.minimum(slots, config.num_slots)[:, None]
        pages = np.arange(control[:, width].size) % config.total_pages
        control[:, width] = pages.reshape(control[:, width].shape)
        self._state = slot_state.fill_slots(self._state, np.int32(context_length))
        self._state.lengths.block_until_ready()
        started_at = time.perf_counter()
        for _ in range(num_steps):
            result = self._round(bucket, control, bucket.tokens - bucket.requests)
        result.block_until_ready()
        seconds = time.perf_counter() - started_at
        self.reset()
        return seconds / (num_steps * self.spec.num_rounds)

    def _round(self, bucket: Bucket, control: np.ndarray, num_drafts: int) -> jax.Array:
        if bucket.is_plain:
            self._state, result = programs.plain_rounds(
                self._params, self._state, control, spec=self.spec
            )
        else:
            self._state, result = programs.speculative_rounds(
                self._params,
                self._state,
                control,
                np.int32(num_drafts),
                spec=self.spec,
                num_rows=bucket.tokens,
            )
        self.known_programs.add(bucket)
        result.copy_to_host_async()
        return result

    def _no_pieces(self, size: int) -> np.ndarray:
        columns = self.spec.prefill_control
        control = np.zeros((size, columns.width), np.int32)
        control[:, columns.at("slot")] = self._config.num_slots
        control[:, columns.at("length")] = 1
        return control

    def _lower_prefill(self, size: int) -> Any:
        control = self._no_pieces(size)
        return programs.prefill_chunk.lower(
            self._params, self._state, control, spec=self.spec
        )

    def _lower_round(self, bucket: Bucket) -> Any:
        control = np.zeros((bucket.requests, self.spec.round_control.width), np.int32)
        if bucket.is_plain:
            return programs.plain_rounds.lower(
                self._params, self._state, control, spec=self.spec
            )
        return programs.speculative_rounds.lower(
            self._params,
            self._state,
            control,
            np.int32(0),
            spec=self.spec,
            num_rows=bucket.tokens,
        )

    def _fill(self, row: np.ndarray, piece: Piece) -> None:
        columns, request = self.spec.prefill_control, piece.request
        known = request._known
        values = {
            "slot": request._slot,
            "draws": piece.draws,
            "first": piece.first,
            "count": piece.count,
            "length": len(known),
            "limit": request._limit,
            "anchor": known[-1],
            "key": request._key,
            "stop_tokens": request._stop_tokens,
            **request._settings,
        }
        for name, value in values.items():
            row[columns.at(name)] = value
        parts = {
            "table": request._pages,
            "tokens": known[piece.first : piece.first + piece.count],
        }
        for name, part in parts.items():
            start = columns.at(name).start
            row[start : start + len(part)] = part
