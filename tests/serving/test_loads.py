"""Closed loops: how many run at once, and that each end brings the next."""

import pytest

from dspark_jax.scheduling.costs import Costs, TokenCurve
from dspark_jax.serving import loads

# First the words to compare with, compiled as for all other modules.
pytestmark = pytest.mark.usefixtures("asked", "quick_compilation")


def make_jobs(asked, count):
    return [
        loads.Job(
            domain="all",
            tokens=want.prompt,
            max_new_tokens=want.max_new_tokens,
            seed=want.seed,
            stop_tokens=want.stop_tokens,
        )
        for want in asked[:count]
    ]


@pytest.mark.parametrize("concurrency", [1, 2, None])
def test_a_closed_loop_keeps_so_many_running(
    concurrency, make_engine, asked, monkeypatch
):
    engine = make_engine("static")
    jobs = make_jobs(asked, 12)
    alive, step = [], engine.step

    def watched():
        metrics = engine.metrics()
        alive.append(metrics["num_running"] + metrics["num_waiting"])
        return step()

    monkeypatch.setattr(engine, "step", watched)
    trial = loads.run_closed(engine, jobs, concurrency)
    assert len(trial.handles) == 12
    assert all(handle.is_done for handle in trial.handles)
    most = concurrency or engine.config.num_slots
    assert max(alive) == most
    assert all(count == most for count in alive[: len(alive) // 3])
    assert trial.num_tokens == trial.metrics["num_tokens"] > 0


@pytest.mark.parametrize("concurrency", [0, 4])
def test_more_at_once_than_slots(concurrency, make_engine, asked):
    engine = make_engine("static")
    with pytest.raises(ValueError, match=rf"must lie in 1\.\.3, .* got {concurrency}"):
        loads.run_closed(engine, make_jobs(asked, 1), concurrency)


def test_costs_that_come_later(make_engine, asked):
    engine = make_engine("compact")
    curve = TokenCurve(packed_tokens=(3,), step_seconds=(0.9,), max_tokens=3)
    cheap = TokenCurve(packed_tokens=(3,), step_seconds=(0.001,), max_tokens=3)
    engine.use_costs(Costs(drafting=curve, plain=cheap))
    handle = asked[0].submit(engine)
    engine.run()
    asked[0].check(handle)
    assert engine.metrics()["steps"]["plain 3x3"]["num_steps"] > 3
    with pytest.raises(TypeError, match="got int"):
        engine.use_costs(3)
