"""The device's side of an engine: its state, its programs, and what they are handed.

Calls return at once with a result that is still being computed. The state is donated
from call to call, so that the device runs them in order: what a later call writes can
never be seen by an earlier one.
"""

import concurrent.futures
import dataclasses
import os
import time
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from dspark_jax.serving import programs, slot_state
from dspark_jax.serving.batching import Bucket
from dspark_jax.serving.control import Columns
from dspark_jax.serving.engine_config import EngineConfig
from dspark_jax.serving.requests import Piece
from dspark_jax.serving.step_spec import Params, StepSpec

# What a program is known by: a bucket, a number of pieces, or this.
CATCH_UP = "catch up"
ProgramName = Bucket | int | str


class StepRunner:
    """Runs an engine's programs; the only holder of its device state."""

    def __init__(
        self, spec: StepSpec, params: Params, config: EngineConfig, *, defers: bool
    ):
        """Empty slots.

        Args:
          defers: whether plain rounds leave a drafter's context behind.
        """
        self.spec = spec
        self.defers = defers
        # Programs that a field does not concern are one program whatever it says, for
        # this engine and for others.
        self._plain_spec = dataclasses.replace(
            spec, is_budgeted=False, caps_commit=False
        )
        self._full_spec = dataclasses.replace(spec, is_budgeted=spec.caps_commit)
        self._prefill_spec = dataclasses.replace(self._plain_spec, num_rounds=1)
        self._params = params
        self._config = config
        self._state: Any = None
        self._deferred: Any = None  # taps that `catch_up` has yet to show the drafter
        # Of a call; None until `warm_up` measures it.
        self.catch_up_seconds: float | None = None
        self.known_programs: set[ProgramName] = set()  # those that have run
        self._compiled: set[ProgramName] = set()
        self.reset()

    @property
    def own_programs(self) -> list[ProgramName]:
        """Programs beside those of the buckets."""
        catch_up = [CATCH_UP] if self.defers else []
        return [*self._config.prefill_sizes, *catch_up]

    def reset(self) -> None:
        """Empty slots and pools, whatever became of the old ones."""
        config = self._config
        self._state = self._deferred = None  # frees the memory first
        self._state = slot_state.make_state(
            self.spec,
            config.num_slots,
            config.max_length,
            config.total_pages,
            config.page_size,
        )
        if self.defers:
            self._deferred = slot_state.make_deferred(
                self.spec,
                self._params.target,
                config.num_slots,
                config.deferred_depth,
            )

    def warm_up(self, buckets: Sequence[Bucket]) -> None:
        """Compiles what `compile_programs` did not yet, and runs all on padding."""
        compile_programs([(self, buckets)])
        for size in self._config.prefill_sizes:
            result = self._prefill(self._padding(size))
        nobody = np.empty((0, self.spec.pages_per_slot), np.int32)
        for bucket in buckets:
            result = self.round(bucket, [], nobody, 0)
        result.block_until_ready()
        if self.defers:
            self._measure_catch_up()

    def prefill(self, pieces: Sequence[Piece]) -> jax.Array:
        """Feeds pieces of prompts; row i of the result is piece i's."""
        control = self._padding(self.prefill_size(len(pieces)))
        for row, piece in zip(control, pieces, strict=False):
            self._fill(row, piece)
        return self._prefill(control)

    def prefill_size(self, num_pieces: int) -> int:
        """Pieces that the program takes in which so many are fed."""
        return next(n for n in self._config.prefill_sizes if n >= num_pieces)

    def _prefill(self, control: np.ndarray) -> jax.Array:
        self._state, result = self._run(len(control), control)
        result.copy_to_host_async()
        return result

    def round(
        self, bucket: Bucket, slots: Sequence[int], tables: np.ndarray, num_drafts: int
    ) -> jax.Array:
        """A round (or several) of the requests in `slots`, row by row.

        Args:
          tables: int32 [n, pages_per_slot], their pages.
          num_drafts: verified at most, of all together.
        """
        columns = self.spec.round_control
        control = self._padding(bucket)
        control[:, columns.at("num_drafts")] = num_drafts
        _seat(control, columns, slots, tables)
        return self._round(bucket, control)

    def catch_up(
        self, slots: Sequence[int], tables: np.ndarray, counts: Sequence[int]
    ) -> None:
        """Shows the drafter `counts` tokens of each, up to its anchor, packed."""
        columns = self.spec.catch_up_control
        control = self._padding(CATCH_UP)
        control[: len(slots), columns.at("count").start] = counts
        _seat(control, columns, slots, tables)
        self._catch_up(control)

    def measure(self, bucket: Bucket, context_length: int, num_steps: int) -> float:
        """Seconds of a round, from `num_steps` calls in a row; empties all slots.

        They run as a loop's do: the host hands out a step and then waits for the one
        before. A step more comes first, from whose end the time counts, so that what
        the first call costs the host is in no step's price.
        """
        columns, config = self.spec.round_control, self._config
        width = columns.at("table")
        control = np.empty((bucket.requests, columns.width), np.int32)
        slots = np.arange(bucket.requests)
        control[:, columns.at("slot")] = np.minimum(slots, config.num_slots)[:, None]
        control[:, columns.at("num_drafts")] = bucket.tokens - bucket.requests
        pages = np.arange(control[:, width].size) % config.total_pages
        control[:, width] = pages.reshape(control[:, width].shape)
        self._state = slot_state.fill_slots(self._state, np.int32(context_length))
        self._state.lengths.block_until_ready()
        ready_at: list[float] = []
        before = None
        for _ in range(1 + num_steps):
            result = self._round(bucket, control)
            if before is not None:
                np.asarray(before)
                ready_at.append(time.perf_counter())
            before = result
        np.asarray(before)
        seconds = time.perf_counter() - ready_at[0]
        self.reset()
        return seconds / (num_steps * self.spec.num_rounds)

    def _measure_catch_up(self, num_calls: int = 4, repeats: int = 3) -> None:
        """Times it on padding, which costs what words do; it has been compiled."""
        control = self._padding(CATCH_UP)
        seconds = []
        for _ in range(repeats):
            self._catch_up(control)  # leads in
            self._state.draft_pool.keys[0].block_until_ready()
            started_at = time.perf_counter()
            for _ in range(num_calls):
                self._catch_up(control)
            self._state.draft_pool.keys[0].block_until_ready()
            seconds.append((time.perf_counter() - started_at) / num_calls)
        self.catch_up_seconds = min(seconds)

    def _catch_up(self, control: np.ndarray) -> None:
        self._state = self._state.replace(draft_pool=self._run(CATCH_UP, control))

    def _round(self, bucket: Bucket, control: np.ndarray) -> jax.Array:
        if bucket.is_plain:
            self._state, self._deferred, result = self._run(bucket, control)
        else:
            self._state, result = self._run(bucket, control)
        result.copy_to_host_async()
        return result

    def _run(self, name: ProgramName, control: np.ndarray) -> Any:
        called = self._program(name, control)
        try:
            returned = called.function(*called.arguments, **called.static)
        finally:
            del called  # an error's traceback would hold the state that `reset` frees
        self.known_programs.add(name)
        return returned

    def _program(self, name: ProgramName, control: np.ndarray) -> "_Program":
        """A program with its arguments."""
        params, state, deferred = self._params, self._state, self._deferred
        if isinstance(name, str):
            known = slot_state.KnownTokens(state.tokens, state.lengths, state.finish)
            return _Program(
                programs.catch_up,
                (params.drafter, state.draft_pool, known, deferred, control),
                {"spec": self._prefill_spec, "num_rows": self._config.catch_up_rows},
            )
        if isinstance(name, int):
            return _Program(
                programs.prefill_chunk,
                (params, state, control),
                {"spec": self._prefill_spec},
            )
        if name.is_plain:
            return _Program(
                programs.plain_rounds,
                (params, state, deferred, control),
                {"spec": self._plain_spec},
            )
        return _Program(
            programs.speculative_rounds,
            (params, state, control),
            {"spec": self._round_spec(name), "num_rows": name.tokens},
        )

    def _padding(self, name: ProgramName) -> np.ndarray:
        """The control of a program in which nobody takes part."""
        if isinstance(name, int):
            columns = self.spec.prefill_control
            control = np.zeros((name, columns.width), np.int32)
            control[:, columns.at("length")] = 1
        else:
            if isinstance(name, str):
                columns, rows = self.spec.catch_up_control, self._config.num_slots
            else:
                columns, rows = self.spec.round_control, name.requests
            control = np.full((rows, columns.width), -1, np.int32)
        control[:, columns.at("slot")] = self._config.num_slots
        return control

    def _round_spec(self, bucket: Bucket) -> StepSpec:
        """That of a speculative round: where all drafts fit, a budget cuts none."""
        holds_all = bucket.tokens == bucket.requests * (1 + self.spec.draft_length)
        return self._full_spec if holds_all else self.spec

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


def compile_programs(
    chosen: Sequence[tuple[StepRunner, Sequence[Bucket]]],
) -> int:
    """Compiles the programs of several runners, many at a time; returns how many.

    Equal programs of different runners are compiled once: static parts, shapes and
    types decide.
    """
    compiling: dict[Hashable, concurrent.futures.Future] = {}
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for runner, buckets in chosen:
            for program in [*runner.own_programs, *buckets]:
                if program in runner._compiled:
                    continue
                called = runner._program(program, runner._padding(program))
                if called.identity not in compiling:
                    # A lowered program's executable is the one that later calls find.
                    # Lowering holds Python; compiling goes on beside it.
                    lowered = called.function.lower(*called.arguments, **called.static)
                    compiling[called.identity] = pool.submit(lowered.compile)
        for future in compiling.values():
            future.result()
    for runner, buckets in chosen:
        runner._compiled.update(runner.own_programs, buckets)
    return len(compiling)


def _seat(
    control: np.ndarray, columns: Columns, slots: Sequence[int], tables: np.ndarray
) -> None:
    """Row i is of the request in slot i, with its pages."""
    control[: len(slots), columns.at("slot").start] = slots
    control[: len(slots), columns.at("table")] = tables


class _Program(NamedTuple):
    function: Any
    arguments: tuple[Any, ...]
    static: dict[str, Any]

    @property
    def identity(self) -> Hashable:
        """What makes two calls run one program."""
        leaves, structure = jax.tree.flatten(self.arguments)
        shapes = tuple((np.shape(leaf), str(leaf.dtype)) for leaf in leaves)
        static = tuple(sorted(self.static.items(), key=lambda item: item[0]))
        return self.function.__name__, static, structure, shapes
