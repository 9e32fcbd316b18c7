"""Measured steps become the table that the engine reads."""

import numpy as np
import pytest

from dspark_jax.scheduling.costs import Grid
from dspark_jax.serving import Bucket, Engine, EngineConfig, profile
from dspark_jax.serving.profile import Measured
from dspark_jax.testing import make_tiny_models

pytestmark = pytest.mark.usefixtures("quick_compilation")

BUCKETS = tuple(Bucket(r, t) for r, t in ((1, 4), (2, 2), (2, 5), (2, 8)))


@pytest.fixture(scope="module")
def engine():
    config = EngineConfig(num_slots=2, max_length=48, page_size=4, buckets=BUCKETS)
    engine = Engine(*make_tiny_models(), config=config)
    engine.warm_up()
    return engine


def test_every_shape_at_every_context(engine):
    calls = []
    measured = profile.measure_steps(
        engine,
        (1, 8),
        num_steps=2,
        repeats=3,
        progress=lambda *numbers: calls.append(numbers),
    )
    assert calls == [(n + 1, 24) for n in range(24)]
    shapes = [(m.requests, m.packed_tokens, m.context_tokens) for m in measured]
    wanted = [(b.requests, b.tokens, b.requests * c) for b in BUCKETS for c in (1, 8)]
    assert shapes == wanted
    assert [m.is_drafting for m in measured[::2]] == [True, False, True, True]
    assert all(0 < m.fastest <= m.seconds <= m.slowest for m in measured)
    # The table that they make is one that an engine takes, and serves with.
    costs = profile.make_costs(measured, {"device": "a test"})
    served = Engine(*make_tiny_models(), config=engine.config, costs=costs)
    handle = served.submit([3, 1, 4], max_new_tokens=6)
    served.run()
    assert len(handle.tokens) == 6


def test_the_median_of_the_repeats(monkeypatch, engine):
    times = iter(np.repeat([9.0, 1.0, 2.0, 3.0], len(BUCKETS)))
    order = []

    def measure(bucket, length, num_steps):
        order.append((bucket, length))
        return next(times)

    monkeypatch.setattr(engine, "measure", measure)
    measured = profile.measure_steps(engine, (4,), num_steps=3, repeats=4)
    # Repeats go round all shapes.
    assert order[: len(BUCKETS)] == [(bucket, 4) for bucket in engine.buckets]
    assert {(m.fastest, m.seconds, m.slowest) for m in measured} == {(1.0, 2.5, 9.0)}


def test_the_table():
    def step(requests, tokens, context, seconds, is_drafting=True):
        return Measured(
            requests, tokens, context, is_drafting, seconds, seconds, seconds
        )

    measured = [
        step(4, 16, 400, 3.0),
        step(4, 8, 400, 2.0),
        step(4, 8, 40, 1.0),
        step(4, 16, 40, 1.5),
        step(1, 4, 10, 0.5),
        step(4, 4, 40, 0.75, is_drafting=False),
    ]
    costs = profile.make_costs(measured, {"device": "a test"})
    assert isinstance(costs.drafting, Grid)
    assert [p.requests for p in costs.drafting.planes] == [1, 4]
    plane = costs.drafting.planes[1]
    assert (plane.packed_tokens, plane.context_tokens) == ((8, 16), (40, 400))
    assert plane.step_seconds == ((1.0, 2.0), (1.5, 3.0))
    assert costs.seconds(4, 12, 220) == pytest.approx(1.875)
    assert costs.plain_seconds(4, 40) == 0.75
    assert costs.info == {"device": "a test"}
    quickest = [m._replace(fastest=m.seconds / 2) for m in measured]
    assert profile.make_costs(quickest, {}).seconds(4, 16, 400) == 3.0
    assert profile.make_costs(quickest, {}, is_fastest=True).seconds(4, 16, 400) == 1.5
    no_plain = profile.make_costs(measured[:5], {})
    assert no_plain.plain is None
    assert no_plain.plain_seconds(4, 40) == 1.0


def test_the_additive_model_of_a_table():
    def step(requests, tokens, context):
        seconds = 1.0 + 0.1 * requests + 0.01 * tokens + 0.001 * context
        return Measured(requests, tokens, context, True, seconds, seconds, seconds)

    sizes = ((r, t, r * c) for r in (1, 4) for t in (8, 16) for c in (10, 100))
    costs = profile.make_costs([step(*size) for size in sizes], {})
    model, worst = profile.additive_model(costs.drafting)
    assert worst < 1e-9
    assert float(model.seconds(4, 12, 200)) == pytest.approx(1.72)


def test_default_context_lengths(engine):
    lengths = profile.default_context_lengths(engine, 2)
    assert lengths == (2, 9, 36)  # of 48, two steps of four tokens and one before
    assert np.all(np.diff(lengths) > 0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda e: profile.measure_steps(e, ()), "`context_lengths` must be strictly"),
        (lambda e: profile.measure_steps(e, (4, 4)), r"at least one, got \[4, 4\]"),
        (
            lambda e: profile.measure_steps(e, (4,), repeats=0),
            "`repeats` must be at least 1, got 0",
        ),
        (
            lambda e: profile.measure_steps(e, (1000,)),
            r"`context_length` must lie in 1\.\.12",
        ),
        (
            lambda e: e.max_measured_context(12),
            "`num_steps` must be at least 1 and fit max_length = 48, got 12",
        ),
        (lambda e: e.max_measured_context(0), "`num_steps` must be at least 1"),
        (
            lambda e: profile.make_costs([Measured(1, 1, 1, False, 1.0, 1.0, 1.0)], {}),
            "`measured` must have a step that drafts",
        ),
    ],
)
def test_bad_arguments(engine, call, message):
    with pytest.raises(ValueError, match=message):
        call(engine)
