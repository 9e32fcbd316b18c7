"""Every request's words are those of plain decoding with its key, whatever happens.

A state machine submits, steps, cancels and waits at random, with few pages, so that
requests are preempted; the planner takes any bucket it may. Places for tokens that the
drafter has not seen are few in some, so that they fill up.
"""

import draft_context
import engine_books
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import stateful
from hypothesis import strategies as st

import dspark_jax
from dspark_jax.serving import Bucket
from dspark_jax.serving.planning import RoundPlan

CONFIGS = (
    ("plain", {"page_size": 8, "num_pages": 5, "chunk": 3}),
    ("static", {"page_size": 2, "num_pages": 20, "prefill_groups": 1}),
    ("compact", {"page_size": 4, "num_pages": 9}),
    ("compact", {"page_size": 4, "num_pages": 9, "max_deferred": 2}),
    (
        "compact",
        {
            "num_slots": 2,
            "rounds_per_step": 2,
            "dispatch_ahead": 0,
            "max_deferred": 3,
        },
    ),
    ("cap-accept", {"page_size": 4, "num_pages": 10, "chunk": 5}),
)


def take_any_bucket(engine, random):
    """Replaces the engine's planner: any bucket that holds the requests."""
    mode, length = engine.config.mode, engine.draft_length

    def plan(step, slots, *_):
        rows = len(slots)
        bucket = random.choice(engine.buckets)
        most = min(bucket.tokens - rows, rows * length)
        if mode == "cap-accept":
            most = random.randint(0, most)
        return bucket, RoundPlan(0 if bucket.is_plain else most, None, 0)

    engine._loop.planner.plan = plan


@pytest.mark.parametrize("case", range(len(CONFIGS)))
def test_words_under_random_arrivals_cancels_and_preemption(case, make_engine, asked):
    mode, fields = CONFIGS[case]
    seen = {"preempted": 0, "cancelled": 0, "finished": 0, "looked at": 0}
    # Compiled outside of the examples.
    engine = make_engine(mode, **fields)
    engine.warm_up()
    total_pages = engine.config.total_pages

    class Machine(stateful.RuleBasedStateMachine):
        @stateful.initialize(random=st.randoms(use_true_random=False))
        def start(self, random):
            self.engine = make_engine(mode, **fields)
            take_any_bucket(self.engine, random)
            self.handles, self.wants, self.streams = [], [], []

        @stateful.rule(index=st.integers(0, 23), count=st.integers(1, 3))
        def submit(self, index, count):
            for _ in range(count):
                want, stream = asked[index], []
                self.handles.append(want.submit(self.engine, on_tokens=stream.extend))
                self.wants.append(want)
                self.streams.append(stream)

        @stateful.rule(count=st.integers(1, 4), looks=st.booleans())
        def step(self, count, looks):
            """To look at the drafter's context, steps under way must be read."""
            for _ in range(count):
                self.engine.step()
                if looks and mode == "compact":
                    seen["looked at"] += draft_context.check(self.engine)

        @stateful.precondition(lambda self: not all(h.is_done for h in self.handles))
        @stateful.rule(data=st.data())
        def cancel(self, data):
            alive = [handle for handle in self.handles if not handle.is_done]
            handle = data.draw(st.sampled_from(alive))
            had = list(handle.tokens)
            assert handle.cancel()
            assert handle.tokens == had
            assert not handle.cancel()

        @stateful.precondition(lambda self: any(h.is_done for h in self.handles))
        @stateful.rule(data=st.data())
        def cancel_what_has_ended(self, data):
            done = [handle for handle in self.handles if handle.is_done]
            handle = data.draw(st.sampled_from(done))
            had = list(handle.tokens)
            assert not handle.cancel()
            assert handle.tokens == had

        @stateful.invariant()
        def bookkeeping(self):
            if hasattr(self, "engine"):
                engine_books.check(self.engine, self.handles)

        def teardown(self):
            if not hasattr(self, "engine"):
                return
            self.engine.run()
            engine_books.check(self.engine, self.handles)
            assert self.engine.metrics()["num_free_pages"] == total_pages
            for handle, want, stream in zip(
                self.handles, self.wants, self.streams, strict=True
            ):
                assert stream == handle.tokens
                if handle.finish_reason == "cancelled":
                    assert tuple(handle.tokens) == want.words[: len(handle.tokens)]
                    seen["cancelled"] += 1
                else:
                    want.check(handle)
                    seen["finished"] += 1
                seen["preempted"] += handle.num_preemptions

    stateful.run_state_machine_as_test(
        Machine,
        settings=hypothesis.settings(
            max_examples=32,
            stateful_step_count=30,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(hypothesis.HealthCheck),
        ),
    )
    assert seen["cancelled"] > 10
    assert seen["finished"] > 100
    assert seen["looked at"] > 100 or mode != "compact"
    assert seen["preempted"] > 5 or "num_pages" not in fields


@pytest.mark.parametrize(
    "fields", [{"num_pages": 9}, {"num_slots": 2, "rounds_per_step": 2}]
)
def test_drafts_are_those_of_one_generation_alone(fields, make_engine, asked, models):
    """Under "seeded" a wrong draft context costs acceptance, not words: it is counted.

    Prompts in pieces, preemption and slots that are used again leave it as it is.
    """
    engine = make_engine("static", **fields)
    handles = [want.submit(engine) for want in asked]
    engine.run()
    if "num_pages" in fields:
        assert any(h.num_preemptions and h.num_rounds > 2 for h in handles)
    longest = max(len(want.prompt) for want in asked)
    prompts = [(*want.prompt, *[0] * (longest - len(want.prompt))) for want in asked]
    stops = [(*want.stop_tokens, -1, -1)[:2] for want in asked]
    alone = dspark_jax.speculative_generate(
        jnp.stack([jax.random.key(want.seed) for want in asked]),
        jnp.asarray(prompts, jnp.int32),
        jnp.asarray([len(want.prompt) for want in asked], jnp.int32),
        **models._asdict(),
        max_new_tokens=max(want.max_new_tokens for want in asked),
        limits=jnp.asarray([want.max_new_tokens for want in asked], jnp.int32),
        sampling=dspark_jax.Sampling(
            temperature=np.array([want.temperature for want in asked], np.float32)
        ),
        stop_tokens=jnp.asarray(stops, jnp.int32),
        options=dspark_jax.Speculation(rule="seeded"),
    )
    for name in ("num_rounds", "num_verified", "num_accepted", "accepted_sum"):
        found = [getattr(handle, name) for handle in handles]
        assert found == getattr(alone.stats, name).tolist(), name


def test_a_thousand_requests_at_once(make_engine, asked):
    engine = make_engine("compact", num_pages=9)
    handles = [asked[i % len(asked)].submit(engine) for i in range(1000)]
    engine.run()
    for i, handle in enumerate(handles):
        asked[i % len(asked)].check(handle)
    metrics = engine.metrics()
    assert sum(metrics["num_finished"].values()) == 1000
    assert metrics["num_tokens"] == sum(len(handle.tokens) for handle in handles)
    assert metrics["num_free_pages"] == 9


def test_words_stream_one_by_one(make_engine, asked):
    engine = make_engine("static")
    handles = [want.submit(engine) for want in asked[:4]]
    assert tuple(handles[2].stream()) == asked[2].words
    engine.run()
    for handle, want in zip(handles, asked, strict=False):
        want.check(handle)


def test_buckets_of_fewer_requests_are_taken_when_few_run(make_engine, asked):
    shapes = (Bucket(1, 1), Bucket(1, 4), Bucket(3, 3), Bucket(3, 12))
    engine = make_engine("compact", buckets=shapes)
    first = asked[0].submit(engine)
    while len(first.tokens) < 8:
        engine.step()
    handles = [want.submit(engine) for want in asked[1:5]]
    engine.run()
    for handle, want in zip([first, *handles], asked, strict=False):
        want.check(handle)
    steps = engine.metrics()["steps"]
    assert steps["verify 1x4"]["num_steps"] > 0
    assert steps["verify 3x12"]["num_steps"] > 0
    assert np.isclose(steps["verify 1x4"]["request_utilisation"], 1)
