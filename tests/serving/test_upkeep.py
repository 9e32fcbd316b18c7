"""What plain steps leave out, the drafter is shown before it must draft again.

Words do not depend on it, acceptance does: so the drafter's context itself is compared,
position by position, with that of all known tokens observed at once.
"""

import dataclasses
import itertools
import random

import draft_context
import jax
import numpy as np
import pytest

from dspark_jax.scheduling.costs import Costs, TokenCurve
from dspark_jax.serving import Bucket, EngineConfig, EngineError, programs
from dspark_jax.serving.planning import RoundPlan
from dspark_jax.serving.slots import SlotTable
from dspark_jax.serving.upkeep import Upkeep
from dspark_jax.types import Bound

# First the words to compare with, compiled as for all other modules.
pytestmark = pytest.mark.usefixtures("asked", "quick_compilation")

PLAIN, FULL = Bucket(3, 3), Bucket(3, 12)
FIELDS = (
    {"num_pages": 9},  # requests are preempted
    {"num_pages": 9, "max_deferred": 1},
    {"num_pages": 9, "max_deferred": 3, "page_size": 4, "chunk": 3},
    {"max_deferred": 5, "rounds_per_step": 2},
    {"max_deferred": 2, "rounds_per_step": 3, "dispatch_ahead": 0},
)


def draft_at(engine, chosen):
    """Replaces the planner: step n drafts if `chosen` says so."""

    def plan(step, slots, *_):
        bucket = FULL if chosen(step) else PLAIN
        return bucket, RoundPlan(bucket.tokens - bucket.requests, None, 0)

    engine._loop.planner.plan = plan


def run(engine, asked, look):
    """Serves all, cancelling some; returns how many positions were looked at."""
    rng = random.Random(0)
    handles = [want.submit(engine) for want in asked]
    num_checked = 0
    while not engine.is_idle:
        engine.step()
        num_checked += look(engine)
        if rng.random() < 0.2:
            running = engine._loop.slots.running
            if running:
                rng.choice(running).cancel()
    for handle, want in zip(handles, asked, strict=True):
        if handle.finish_reason != "cancelled":
            want.check(handle)
    return num_checked


@pytest.mark.parametrize("fields", FIELDS)
@pytest.mark.parametrize("seed", [0, 1])
def test_the_context_is_that_of_all_known_tokens(seed, fields, make_engine, asked):
    engine = make_engine("compact", **fields)
    rng = random.Random(seed)
    # Long stretches of plain steps, so that small rings fill up, then a few drafts.
    drafts = [rng.random() < 0.15 for _ in range(10_000)]
    draft_at(engine, lambda step: drafts[step])

    def look(engine):
        count = draft_context.check(engine)
        if rng.random() < 0.3:
            draft_context.catch_up_all(engine)
            count += draft_context.check(engine)
        return count

    assert run(engine, 3 * asked, look) > 600
    metrics = engine.metrics()
    assert metrics["num_catch_ups"] > 5
    assert metrics["num_caught_up"] > metrics["num_catch_ups"]
    if "num_pages" in fields:
        assert metrics["num_preemptions"] > 3
    assert metrics["num_finished"]["cancelled"] > 1


def off_by_one(original):
    """Catch-ups of the positions before the right ones."""

    def catch_up(params, pool, known, *args, **kwargs):
        shifted = known._replace(lengths=known.lengths - 1)
        return original(params, pool, shifted, *args, **kwargs)

    return catch_up


def places_off_by_one(original):
    """Catch-ups that show the taps of the tokens before the right ones."""

    def catch_up(params, pool, known, deferred, *args, **kwargs):
        shifted = jax.numpy.roll(deferred, 1, axis=1)
        return original(params, pool, known, shifted, *args, **kwargs)

    return catch_up


@pytest.mark.parametrize("mutant", [off_by_one, places_off_by_one])
def test_a_catch_up_at_wrong_positions_is_caught(
    mutant, make_engine, asked, monkeypatch
):
    monkeypatch.setattr(programs, "catch_up", mutant(programs.catch_up))
    engine = make_engine("compact", **FIELDS[0])
    draft_at(engine, lambda step: step % 7 == 0)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        run(engine, asked, draft_context.check)


def test_tokens_that_wait_for_another_request_are_caught(
    make_engine, asked, monkeypatch
):
    """A slot that is used again: what the last one left is not the next one's."""
    admit = SlotTable.admit

    def inherit(table):
        left = inherit.left
        slots = admit(table)
        for request in table.running:
            if request._slot in slots and not request.num_preemptions:
                request._num_deferred = left.get(request._slot, 0)
        left.update({r._slot: r._num_deferred for r in table.running})
        return slots

    inherit.left = {}
    engine = make_engine("compact", **FIELDS[0])
    draft_at(engine, lambda step: step % 7 == 0)
    monkeypatch.setattr(SlotTable, "admit", inherit)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        run(engine, asked, draft_context.check)


def test_what_ends_without_drafting_again_never_pays(make_engine, asked):
    costs = Costs(
        drafting=TokenCurve(
            packed_tokens=(3, 6, 12), step_seconds=(0.9,) * 3, max_tokens=12
        ),
        plain=TokenCurve(packed_tokens=(3,), step_seconds=(0.001,), max_tokens=3),
    )
    engine = make_engine("compact", costs=costs, probe_every=1000, max_deferred=18)
    handles = [want.submit(engine) for want in asked]
    engine.run()
    for handle, want in zip(handles, asked, strict=True):
        want.check(handle)
    metrics = engine.metrics()
    assert metrics["num_catch_ups"] == metrics["num_caught_up"] == 0
    assert set(metrics["steps"]) == {"prefill 1", "prefill 2", "plain 3x3"}


def test_modes_without_plain_steps_keep_nothing(make_engine, asked):
    for mode in ("plain", "static", "cap-accept"):
        engine = make_engine(mode)
        assert engine._loop.runner._deferred is None
        assert engine.num_programs == 3
    engine = make_engine("compact", buckets=(FULL,))
    assert engine._loop.runner._deferred is None
    engine = make_engine("compact", max_deferred=5)
    deferred = engine._loop.runner._deferred
    assert deferred.shape[:2] == (3, 5)
    assert engine.num_programs == 6


def test_a_call_has_rows_for_a_few_tokens_of_every_request():
    def rows(**fields):
        return EngineConfig(**fields).catch_up_rows

    assert rows(num_slots=256, max_deferred=16) == 1024
    assert rows(num_slots=2, max_deferred=16) == 16
    assert rows(num_slots=1, max_deferred=16) == 16
    assert rows(num_slots=8, max_deferred=2) == 16
    assert EngineConfig(max_deferred=2, rounds_per_step=3).deferred_depth == 3
    assert EngineConfig(max_deferred=5, rounds_per_step=3).deferred_depth == 5


@dataclasses.dataclass
class Request:
    _num_deferred: int


def due(counts, *, is_drafting, **fields):
    config = EngineConfig(**{"num_slots": len(counts), "max_deferred": 16, **fields})
    upkeep = Upkeep(config, defers=True)
    requests = [Request(count) for count in counts]
    calls = upkeep.due(requests, is_drafting=is_drafting)
    taken = [[r._num_deferred for r in of_call] for of_call in calls]
    assert all(0 < sum(of_call) <= config.catch_up_rows for of_call in taken)
    ids = [id(r) for of_call in calls for r in of_call]
    assert len(ids) == len(set(ids))
    fewest = -(-sum(counts) // config.catch_up_rows)
    assert len(taken) <= 2 * fewest
    assert len(taken) >= fewest or not is_drafting
    return taken


def test_a_drafting_round_needs_all_that_waits():
    assert due([16, 0, 3, 16, 0], is_drafting=True) == [[16, 3], [16]]
    assert due([0, 0], is_drafting=True) == []


def test_a_plain_round_needs_room_for_its_tokens():
    assert due([15, 3, 9, 0], is_drafting=False) == []
    # 16 rows: the full one leaves no room, or room for the fullest others.
    assert due([16, 3, 9, 1], is_drafting=False) == [[16]]
    taken = due([4, 3, 2, 1], is_drafting=False, max_deferred=4)
    assert taken == [[4, 3, 2, 1]]
    taken = due([3, 2, 1], is_drafting=False, max_deferred=4, rounds_per_step=2)
    assert taken == [[3, 2, 1]]
    taken = due([2, 2, 1], is_drafting=False, max_deferred=4, rounds_per_step=2)
    assert taken == []


def random_counts():
    rng = np.random.default_rng(0)
    return [rng.integers(0, 17, size=rng.integers(1, 40)).tolist() for _ in range(50)]


@pytest.mark.parametrize("counts", random_counts())
def test_nothing_that_waits_is_forgotten(counts):
    taken = due(counts, is_drafting=True)
    everyone = itertools.chain.from_iterable(taken)
    assert sorted(everyone) == sorted(c for c in counts if c)
    taken = due(counts, is_drafting=False)
    assert [*itertools.chain.from_iterable(taken)].count(16) == counts.count(16)
    assert bool(taken) is (16 in counts)


def test_the_price_of_catching_up_is_taken_out_of_the_rounds_time(
    make_engine, asked, monkeypatch
):
    engine = make_engine("compact", **FIELDS[0])
    assert engine.warm_up() > 0
    assert 0 < engine._loop.runner.catch_up_seconds < 0.1
    draft_at(engine, lambda step: step % 4 == 0)
    seen, asked_for = [], []
    planner = engine._loop.planner
    monkeypatch.setattr(planner, "observe", lambda *args: seen.append(args))
    plan = planner.plan
    monkeypatch.setattr(
        planner, "plan", lambda *args: (asked_for.append(args[4]), plan(*args))[1]
    )
    engine._loop.runner.catch_up_seconds = 1e9  # more than any step took
    for want in asked[:6]:
        want.submit(engine)
    engine.run()
    assert {0, 1e9} <= set(asked_for)
    kinds = {bucket for bucket, *_ in seen}
    assert kinds <= {PLAIN, FULL}
    assert all(seconds > 0 for *_, seconds in seen)
    assert PLAIN in kinds


def test_a_round_after_catch_ups_of_unknown_price_is_not_timed(
    make_engine, asked, monkeypatch
):
    """Without `warm_up` nobody knows what of its time was theirs."""
    engine = make_engine("compact")
    draft_at(engine, lambda step: step % 4 == 0)
    seen = []
    monkeypatch.setattr(
        engine._loop.planner, "observe", lambda *args: seen.append(args)
    )
    for want in asked[:2] * 3:
        want.submit(engine)
    engine.run()
    metrics = engine.metrics()
    assert metrics["num_catch_ups"] == metrics["steps"]["verify 3x12"]["num_steps"] > 3
    assert {bucket for bucket, *_ in seen} == {PLAIN}


@dataclasses.dataclass(frozen=True)
class NoTaps:
    block_size: int = 3
    tap_layers: tuple[int, ...] = ()
    target_fingerprint: str = ""


def observe_tokens(drafter, width, params, state, tokens, positions, taps):
    assert taps is None
    features = jax.nn.one_hot(tokens % width, width, dtype=np.float32)
    return drafter.observe(params, state, tokens, positions, features)


def test_a_drafter_may_observe_tokens_alone(models, make_engine, asked):
    width = len(models.drafter.config.tap_layers) * models.target.config.width
    drafter = models.drafter._replace(
        config=NoTaps(), observe=Bound(observe_tokens, (models.drafter, width))
    )
    engine = make_engine("compact", models=models._replace(drafter=drafter))
    draft_at(engine, lambda step: step % 7 == 0)
    assert run(engine, asked, draft_context.check) > 300
    assert engine.metrics()["num_catch_ups"] > 3


def test_a_device_error_in_a_catch_up_is_that_of_its_step(
    make_engine, asked, monkeypatch
):
    def broken(*args, **kwargs):
        raise jax.errors.JaxRuntimeError("INTERNAL: the device fell over")

    engine = make_engine("compact", **FIELDS[0])
    draft_at(engine, lambda step: step % 4 == 0)
    handles = [want.submit(engine) for want in asked]
    with monkeypatch.context() as patch:
        patch.setattr(programs, "catch_up", broken)
        with pytest.raises(EngineError, match="the engine is usable: INTERNAL"):
            engine.run()
    failed = [handle for handle in handles if handle.finish_reason == "error"]
    assert failed
    engine.run()
    assert draft_context.check(engine) == 0  # nothing is left
    for handle, want in zip(handles, asked, strict=True):
        if handle not in failed:
            want.check(handle)
    assert engine.metrics()["num_free_pages"] == 9
