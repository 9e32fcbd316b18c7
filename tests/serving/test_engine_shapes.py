"""Nothing compiles after warm-up, and every bucket is declared."""

import logging
import time

import jax
import numpy as np
import pytest

from dspark_jax import serving
from dspark_jax.scheduling.costs import Costs, TokenCurve
from dspark_jax.scheduling.online_costs import OnlineCosts
from dspark_jax.serving import Bucket, planning, programs
from dspark_jax.serving.batching import check_buckets, default_buckets
from dspark_jax.serving.planning import RoundPlan

COMPILED = "/jax/core/compile/backend_compile_duration"


@pytest.fixture
def compilations():
    """Events of the compiler while the test runs."""
    events = []

    def listen(event, duration, **kwargs):
        if event == COMPILED:
            events.append(kwargs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield events
    jax.monitoring.unregister_event_duration_listener(listen)


def curve(*seconds):
    tokens = (3, 6, 12)[: len(seconds)]
    return TokenCurve(packed_tokens=tokens, step_seconds=seconds, max_tokens=tokens[-1])


def test_nothing_compiles_after_warm_up_in_any_bucket(make_engine, asked, compilations):
    """Prices change from run to run, so that every shape is the best one once."""
    jax.jit(lambda x: x * 3)(np.float32(1))
    assert compilations, "the listener hears nothing"
    seen = set()
    for seconds in ((9, 9, 9, 1), (1, 9, 9, 9), (1, 1, 9, 9), (1, 1, 1, 9)):
        *drafting, plain = (0.001 * s for s in seconds)
        costs = Costs(drafting=curve(*drafting), plain=curve(plain))
        engine = make_engine(
            "compact", num_pages=9, costs=OnlineCosts(costs), probe_every=3
        )
        assert engine.num_programs == 6 <= 12
        engine.warm_up()
        compilations.clear()
        handles = [want.submit(engine) for want in asked]
        engine.run()
        for handle, want in zip(handles, asked, strict=True):
            want.check(handle)
        assert not compilations
        seen |= set(engine.metrics()["steps"])
    assert seen == {"prefill 1", "prefill 2", "plain 3x3", "verify 3x6", "verify 3x12"}


def test_programs_that_engines_share_compile_once(make_engine, asked, compilations):
    """Prefill and full windows are the same programs in "static" and "compact"."""
    fields = {"num_pages": 8, "max_length": 28}  # shapes of no other test
    engines = [make_engine(mode, **fields) for mode in ("plain", "static", "compact")]
    compilations.clear()
    assert serving.warm_up(engines) > 0
    # plain: 1 round, 2 prefill; static: 1 and 2; compact: no drafts, half windows.
    assert len(compilations) <= 8 + 2  # and two small ones that empty slots need
    compilations.clear()
    for engine in engines:
        handles = [want.submit(engine) for want in asked if len(want.prompt) < 10]
        engine.run()
        assert all(handle.is_done for handle in handles)
    assert not compilations


def test_padding_rows_take_no_budget(make_engine, asked):
    """They read the state of the last slot, which is running here."""
    costs = Costs(drafting=curve(9, 1, 9), plain=curve(9))
    engine = make_engine(
        "compact",
        num_slots=1,
        costs=OnlineCosts(costs),
        buckets=tuple(Bucket(3, tokens) for tokens in (3, 6, 12)),
    )
    want = max(asked, key=lambda asked: len(asked.words))
    handle = want.submit(engine)
    engine.run()
    want.check(handle)
    metrics = engine.metrics()
    assert metrics["steps"]["verify 3x6"]["num_steps"] >= 3
    # Three drafts are paid for, and one request drafts three.
    counts = metrics["verify_length_counts"]
    full = {"stop": 1, "length": 2}[handle.finish_reason]  # rounds that may be cut
    assert counts[3] >= sum(counts) - full


def test_without_prices_every_window_is_full(make_engine, asked, caplog):
    with caplog.at_level(logging.WARNING):
        engine = make_engine("compact", num_pages=9)
    assert "every window is full" in caplog.text
    for want in asked[:4]:
        want.submit(engine)
    engine.run()
    assert set(engine.metrics()["steps"]) == {"prefill 1", "prefill 2", "verify 3x12"}


def test_dear_drafts_are_probed_every_third_step(make_engine, asked):
    costs = Costs(drafting=curve(0.9, 0.9, 0.9), plain=curve(0.001))
    engine = make_engine("compact", num_pages=9, costs=costs, probe_every=3)
    handle = asked[0].submit(engine)
    engine.run()
    asked[0].check(handle)
    steps = engine.metrics()["steps"]
    drafting = sum(s["num_steps"] for name, s in steps.items() if "verify" in name)
    plain = steps["plain 3x3"]["num_steps"]
    # 1 draft after 3 steps without one.
    assert drafting == plain // 3 > 0
    assert handle.num_rounds == drafting


def test_metrics_say_what_happened(make_engine, asked):
    costs = Costs(drafting=curve(0.004, 0.005, 0.006), plain=curve(0.005))
    engine = make_engine("compact", num_pages=9, costs=OnlineCosts(costs))
    handles = [want.submit(engine) for want in asked[:12]]
    assert engine.metrics()["num_waiting"] == 12
    engine.step()
    metrics = engine.metrics()
    assert metrics["num_running"] > 0
    assert metrics["num_running"] + metrics["num_waiting"] == 12
    engine.run()
    metrics = engine.metrics(reset=True)
    assert metrics["mode"] == "compact"
    assert metrics["num_running"] == metrics["num_waiting"] == 0
    assert metrics["num_tokens"] == sum(len(handle.tokens) for handle in handles)
    for name in ("num_rounds", "num_verified", "num_accepted", "accepted_sum"):
        if name in metrics:
            assert metrics[name] == sum(getattr(h, name) for h in handles)
    rounds = sum(handle.num_rounds for handle in handles)
    tau = sum(handle.accepted_sum for handle in handles) / rounds
    assert metrics["accepted_length"] == pytest.approx(tau)
    verified = sum(handle.num_verified for handle in handles)
    assert metrics["mean_verify_length"] == pytest.approx(verified / rounds)
    counts = metrics["verify_length_counts"]
    assert sum(counts) == rounds
    assert np.dot(counts, range(4)) == verified
    calibration = metrics["calibration"]
    assert calibration["num_reached_at"][0] == rounds - counts[0]
    assert all(0 <= share <= 1 for share in calibration["observed"])
    assert abs(calibration["drift"]) < 1
    for step in metrics["steps"].values():
        assert step["mean_seconds"] > 0
        assert 0 < step["row_utilisation"] <= 1
        assert 0 <= step["request_utilisation"] <= 1
    assert any(
        step["predicted_error_share"] is not None for step in metrics["steps"].values()
    )
    assert metrics["cost_drift"] > 0
    assert 0 < metrics["host_share"] <= 1
    assert engine.metrics()["num_rounds"] == 0


@pytest.mark.parametrize("cap", [0, 3])
def test_slots_that_a_cap_kept_from_being_judged_say_nothing_of_confidences(
    cap, make_engine, asked, monkeypatch
):
    """ "cap-accept" verifies all: what it does not commit was not refused."""
    engine = make_engine("cap-accept", num_slots=1)
    plan = RoundPlan(cap, None, 0)
    monkeypatch.setattr(engine._loop.planner, "plan", lambda *_: (Bucket(1, 4), plan))
    handles = [want.submit(engine) for want in asked]
    engine.run()
    metrics = engine.metrics()
    num_reached = sum(metrics["calibration"]["num_reached_at"])
    assert sum(handle.num_verified for handle in handles) > 0
    assert (num_reached > 0) is (cap > 0)
    if cap == 0:
        assert metrics["calibration"]["drift"] == 0


def record_costs(monkeypatch):
    """Costs that follow real steps, and the seconds that they are given."""
    costs = OnlineCosts(Costs(drafting=curve(0.004, 0.005, 0.006), plain=curve(0.005)))
    seen = []
    monkeypatch.setattr(costs, "update", lambda *args, **_: seen.append(args[3]))
    return costs, seen


def test_steps_during_which_a_program_was_compiled_are_no_prices(
    make_engine, asked, monkeypatch
):
    """Without `warm_up`, first calls take seconds; the costs must not learn that."""
    make_engine("compact", num_pages=9).warm_up()
    costs, seen = record_costs(monkeypatch)
    engine = make_engine("compact", num_pages=9, costs=costs)
    rounds = programs.speculative_rounds
    compiled = set()

    def compile_first(*args, num_rows, **kwargs):
        if num_rows not in compiled:
            compiled.add(num_rows)
            time.sleep(0.5)
        return rounds(*args, num_rows=num_rows, **kwargs)

    def plan(step, *_):
        return Bucket(3, 12 if step < 8 else 6), RoundPlan(3, None, 9)

    monkeypatch.setattr(programs, "speculative_rounds", compile_first)
    monkeypatch.setattr(engine._loop.planner, "plan", plan)
    handle = asked[0].submit(engine)
    engine.run()
    asked[0].check(handle)
    assert compiled == {6, 12}
    assert len(seen) > 4
    assert max(seen) < 0.5


def test_steps_whose_time_nobody_saw_are_no_prices(make_engine, asked, monkeypatch):
    """A round that had ended when the prefill before it was read looks free."""
    costs, seen = record_costs(monkeypatch)
    engine = make_engine("compact", num_pages=9, costs=costs)
    engine.warm_up()
    for want in asked:
        want.submit(engine, on_tokens=lambda tokens: time.sleep(0.01))
    engine.run()
    assert len(seen) > 10
    assert min(seen) > 2e-4


def test_plans_see_confidences_of_this_stay_in_the_slot_only(
    make_engine, asked, monkeypatch
):
    """Not a stranger's, and none from before a preemption; none of the last step."""
    costs = Costs(drafting=curve(0.004, 0.005, 0.006), plain=curve(0.009))
    engine = make_engine("compact", num_pages=9, costs=costs)
    admit, budget = engine._loop.slots.admit, planning.budget
    admitted_at, ages = {}, []

    def recorded_admit():
        slots = admit()
        admitted_at.update(dict.fromkeys(slots, engine._loop.step_number))
        return slots

    def checked_budget(past, *, step, **kwargs):
        slots = [request._slot for request in engine._loop.slots.decoding]
        for slot, origin in zip(slots, past.origin_step.tolist(), strict=True):
            if origin >= 0:
                assert origin >= admitted_at[slot]
                ages.append(step - origin)
        return budget(past, step=step, **kwargs)

    monkeypatch.setattr(engine._loop.slots, "admit", recorded_admit)
    monkeypatch.setattr(planning, "budget", checked_budget)
    handles = [want.submit(engine) for want in asked]
    engine.run()
    assert sum(handle.num_preemptions for handle in handles) > 0
    assert min(ages) == 2


def test_steps_can_be_measured(make_engine, asked):
    engine = make_engine("compact", num_pages=9)
    for bucket in engine.buckets:
        assert 0 < engine.measure(bucket, 8, num_steps=2) < 1
    with pytest.raises(ValueError, match=r"`bucket` must be one of .* got Bucket"):
        engine.measure(Bucket(1, 1), 8)
    with pytest.raises(ValueError, match=r"`context_length` must lie in 1\.\.20"):
        engine.measure(engine.buckets[0], 25, num_steps=2)
    # It is as new.
    handle = asked[1].submit(engine)
    with pytest.raises(serving.EngineError, match="needs an idle engine"):
        engine.measure(engine.buckets[0], 8)
    engine.run()
    asked[1].check(handle)


@pytest.mark.parametrize("mode", serving.MODES)
@pytest.mark.parametrize("num_slots", [1, 2, 16, 64, 255])
def test_default_buckets_are_few_and_complete(mode, num_slots):
    for length in (1, 3, 7, 15):
        buckets = default_buckets(mode, num_slots, length)
        check_buckets(buckets, mode, num_slots, length)
        assert len(buckets) + 3 <= 12  # two for prefill, one to catch up
        assert max(bucket.requests for bucket in buckets) == num_slots
