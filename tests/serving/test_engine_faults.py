"""Bad requests and faults: a clear error each, and nothing lost."""

import weakref

import jax
import jax.numpy as jnp
import pytest

import dspark_jax
from dspark_jax import serving
from dspark_jax.serving import EngineError, programs, results, slot_state

# First the words to compare with, compiled as for all other modules.
pytestmark = pytest.mark.usefixtures("asked", "quick_compilation")

COMPACT = {"num_pages": 9}  # the shapes of the other tests

BAD_REQUESTS = (
    ({"tokens": []}, ValueError, "`tokens` must hold at least one token"),
    ({"tokens": [19]}, ValueError, r"`tokens` must lie in 0\.\.18 .* got 19"),
    ({"tokens": [-1]}, ValueError, r"`tokens` must lie in 0\.\.18 .* got -1"),
    ({"tokens": [0.5]}, TypeError, "`tokens` must be a list of token ids, got float64"),
    ({"tokens": [[1]]}, TypeError, r"`tokens` must be a list .* shape \(1, 1\)"),
    ({"max_new_tokens": 0}, ValueError, "`max_new_tokens` must be at least 1, got 0"),
    ({"max_new_tokens": 2.0}, TypeError, "`max_new_tokens` must be an int"),
    ({"max_new_tokens": 31}, ValueError, "make 33 tokens, but .* max_length is 32"),
    ({"tokens": [1] * 70}, ValueError, "longer than the target's max_position 64"),
    ({"seed": 0.5}, TypeError, "`seed` must be an int or a typed key"),
    ({"seed": jnp.zeros(2, jnp.uint32)}, TypeError, "`seed` must be an int or a typed"),
    ({"sampling": 0.5}, TypeError, "`sampling` must be a Sampling, got float"),
    ({"stop_tokens": [40]}, ValueError, r"`stop_tokens` must lie in 0\.\.18"),
    ({"stop_tokens": [1, 2, 3]}, ValueError, "at most max_stop_tokens = 2, got 3"),
    (
        {"sampling": dspark_jax.Sampling(temperature=-1.0)},
        ValueError,
        r"`sampling.temperature` must be in \[0, 1e\+30\], got -1.0",
    ),
    ({"tokens": [[1], [1, 2]]}, TypeError, "`tokens` must be an array or nested lists"),
    ({"on_tokens": 5}, TypeError, "`on_tokens` must be a function or None, got int"),
    (
        {"seed": jax.random.split(jax.random.key(0), 2)},
        ValueError,
        r"`seed` must be an int or one typed key, got keys of shape \(2,\)",
    ),
    (
        {"sampling": dspark_jax.Sampling(temperature=1.0, top_p=0.5)},
        ValueError,
        r"`sampling.top_p` must be declared in EngineConfig.sampling_fields",
    ),
)


@pytest.mark.parametrize(("changed", "error", "message"), BAD_REQUESTS)
def test_bad_requests(changed, error, message, make_engine, asked):
    engine = make_engine("compact", **COMPACT)
    good = asked[0].submit(engine)
    arguments = {"tokens": [1, 2], "max_new_tokens": 4, **changed}
    with pytest.raises(error, match=message):
        engine.submit(arguments.pop("tokens"), **arguments)
    engine.run()
    asked[0].check(good)


def test_settings_are_checked_whatever_was_accepted_before(make_engine):
    engine = make_engine("plain", sampling_fields=("temperature", "top_k"))
    for top_k in (2, 1):
        sampling = dspark_jax.Sampling(temperature=1.0, top_k=top_k)
        engine.submit([1], max_new_tokens=1, sampling=sampling)
    for top_k in (2.0, True):  # equal to those
        sampling = dspark_jax.Sampling(temperature=1.0, top_k=top_k)
        with pytest.raises(TypeError, match=r"`sampling.top_k` must hold integers"):
            engine.submit([1], max_new_tokens=1, sampling=sampling)


def test_a_request_longer_than_all_pages(make_engine):
    engine = make_engine("compact", num_pages=4)
    with pytest.raises(ValueError, match="need 5 pages of 4, but the engine has 4"):
        engine.submit([1, 2], max_new_tokens=15)


def test_a_full_queue(make_engine, asked):
    engine = make_engine("compact", max_waiting=2, **COMPACT)
    handles = [asked[0].submit(engine), asked[1].submit(engine)]
    with pytest.raises(serving.QueueFullError, match=r"2 requests wait .* = 2 allows"):
        asked[2].submit(engine)
    engine.run()
    for handle, want in zip(handles, asked, strict=False):
        want.check(handle)


def test_a_callback_that_raises_fails_its_request_alone(make_engine, asked):
    def fail(tokens):
        raise KeyError("the reader went away")

    engine = make_engine("compact", **COMPACT)
    bad = asked[0].submit(engine, on_tokens=fail)
    good = [want.submit(engine) for want in asked[1:8]]
    engine.run()
    assert bad.finish_reason == "error"
    assert isinstance(bad.error, KeyError)
    assert tuple(bad.tokens) == asked[0].words[: len(bad.tokens)]
    for handle, want in zip(good, asked[1:], strict=False):
        want.check(handle)
    assert engine.metrics()["num_free_pages"] == 9


def test_callbacks_may_submit_and_cancel_but_not_step(make_engine, asked):
    engine = make_engine("compact", **COMPACT)
    late, errors = [], []

    def react(tokens):
        if late:
            return
        late.append(asked[3].submit(engine))
        victim.cancel()
        try:
            engine.step()
        except EngineError as error:
            errors.append(str(error))

    first = asked[0].submit(engine, on_tokens=react)
    victim = asked[1].submit(engine)
    engine.run()
    asked[0].check(first)
    asked[3].check(late[0])
    assert victim.finish_reason == "cancelled"
    assert errors == ["`Engine.step` was called from a callback of its own"]


def test_cancelling_twice_and_after_the_end(make_engine, asked):
    engine = make_engine("compact", **COMPACT)
    waiting, done = asked[0].submit(engine), asked[1].submit(engine)
    assert waiting.cancel()
    assert not waiting.cancel()
    engine.run()
    assert waiting.finish_reason == "cancelled"
    assert waiting.tokens == []
    assert not done.cancel()
    asked[1].check(done)


def test_an_interrupt_in_a_callback_loses_no_word(make_engine, asked):
    """Ctrl-C goes through, and the engine goes on where it was."""
    engine = make_engine("compact", **COMPACT)
    streams = [[] for _ in asked]
    num_calls = 0

    def reader(stream):
        def read(tokens):
            nonlocal num_calls
            num_calls += 1
            stream.extend(tokens)
            if num_calls % 3 == 0:
                raise KeyboardInterrupt

        return read

    handles = [
        want.submit(engine, on_tokens=reader(stream))
        for want, stream in zip(asked, streams, strict=True)
    ]
    num_interrupts = 0
    while not engine.is_idle:
        try:
            engine.run()
        except KeyboardInterrupt:
            num_interrupts += 1
    assert num_interrupts > 10
    for handle, want, stream in zip(handles, asked, streams, strict=True):
        want.check(handle)
        assert stream == handle.tokens


@pytest.mark.parametrize("where", ["is_ready", "new_tokens"])
def test_an_interrupt_half_way_through_a_step_is_a_fault(
    where, make_engine, asked, monkeypatch
):
    """What the device did and the host has not noted is not guessed."""

    def interrupt(*args):
        raise KeyboardInterrupt

    engine = make_engine("compact", **COMPACT)
    handles = [want.submit(engine) for want in asked[:8]]
    while not handles[0].tokens:
        engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(results, where, interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.run()
    engine.run()
    failed = [handle for handle in handles if handle.finish_reason == "error"]
    assert handles[0] in failed
    assert all(isinstance(handle.error, KeyboardInterrupt) for handle in failed)
    for handle, want in zip(handles, asked, strict=False):
        if handle in failed:
            assert tuple(handle.tokens) == want.words[: len(handle.tokens)]
        else:
            want.check(handle)
    assert engine.metrics()["num_free_pages"] == 9


def test_an_interrupt_while_the_host_waits_loses_nothing(
    make_engine, asked, monkeypatch
):
    engine = make_engine("compact", **COMPACT)
    handles = [want.submit(engine) for want in asked[:8]]
    engine.step()
    step = engine._loop.in_flight[0]
    result, step.result = step.result, Interrupting()
    with pytest.raises(KeyboardInterrupt):
        engine.run()
    step.result = result
    engine.run()
    for handle, want in zip(handles, asked, strict=False):
        want.check(handle)


class Interrupting:
    """A result that Ctrl-C is pressed at."""

    def __array__(self, *args, **kwargs):
        raise KeyboardInterrupt

    def is_ready(self):
        return False


def broken(*args, **kwargs):
    raise jax.errors.JaxRuntimeError("INTERNAL: the device fell over")


def test_a_device_error_ends_its_requests_and_the_engine_goes_on(
    make_engine, asked, monkeypatch
):
    engine = make_engine("compact", **COMPACT)
    running = [want.submit(engine) for want in asked[:6]]
    while not running[0].tokens:
        engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(programs, "speculative_rounds", broken)
        message = "a step failed .* the engine is usable: INTERNAL: the device fell"
        with pytest.raises(EngineError, match=message):
            engine.run()
    failed = [handle for handle in running if handle.finish_reason == "error"]
    assert running[0] in failed
    assert isinstance(failed[0].error, jax.errors.JaxRuntimeError)
    assert any(not handle.is_done for handle in running)
    late = asked[7].submit(engine)
    engine.run()
    asked[7].check(late)
    for handle, want in zip(running, asked, strict=False):
        if handle not in failed:
            want.check(handle)
    assert engine.metrics()["num_free_pages"] == 9


def test_a_prompt_whose_feeding_fails_again_is_given_up(
    make_engine, asked, monkeypatch
):
    """It may be what the device falls over: the others must get past it."""
    engine = make_engine("compact", **COMPACT)
    handle = engine.submit([1] * 12, max_new_tokens=4)  # in three pieces
    waiting = asked[1].submit(engine)
    with monkeypatch.context() as patch:
        patch.setattr(programs, "prefill_chunk", broken)
        for num_ended in (0, 1):
            assert not handle.is_done
            with pytest.raises(EngineError, match=f"ended {num_ended} requests"):
                engine.run()
    assert handle.finish_reason == "error"
    assert not waiting.is_done
    engine.run()
    asked[1].check(waiting)


def test_a_failed_call_lets_go_of_the_old_state(make_engine, asked, monkeypatch):
    """A device that is full must have it back before the new one is made."""

    def fill_up(*args, **kwargs):
        del args, kwargs
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    engine = make_engine("compact", **COMPACT)
    old = weakref.ref(engine._loop.runner._state.target_pool.keys[0])
    kept, make_state = [], slot_state.make_state
    monkeypatch.setattr(programs, "prefill_chunk", fill_up)
    monkeypatch.setattr(
        slot_state,
        "make_state",
        lambda *args: (kept.append(old()), make_state(*args))[1],
    )
    asked[0].submit(engine)
    with pytest.raises(EngineError, match="the engine is usable: RESOURCE_EXHAUSTED"):
        engine.run()
    assert kept == [None]


@pytest.mark.parametrize("call", ["warm_up", "measure"])
def test_a_device_error_outside_of_steps(call, make_engine, asked, monkeypatch):
    engine = make_engine("compact", **COMPACT)
    calls = {
        "warm_up": engine.warm_up,
        "measure": lambda: engine.measure(engine.buckets[0], 8, num_steps=2),
    }

    def lose(params, slots, *args, **kwargs):
        jax.tree.map(lambda leaf: leaf.delete(), slots)  # as a donating call does
        raise jax.errors.JaxRuntimeError("INTERNAL: the device fell over")

    lose.lower = programs.plain_rounds.lower
    with monkeypatch.context() as patch:
        patch.setattr(programs, "plain_rounds", lose)
        with pytest.raises(EngineError, match="the engine is usable: INTERNAL"):
            calls[call]()
    handle = asked[1].submit(engine)
    engine.run()
    asked[1].check(handle)


def test_an_engine_that_cannot_recover_says_so(make_engine, asked, monkeypatch):
    engine = make_engine("compact", **COMPACT)
    handle = asked[0].submit(engine)
    with monkeypatch.context() as patch:
        patch.setattr(programs, "speculative_rounds", broken)
        patch.setattr(slot_state, "make_state", broken)
        with pytest.raises(EngineError, match="the engine is not usable: INTERNAL"):
            engine.run()
    assert handle.finish_reason == "error"
    calls = (
        engine.step,
        engine.warm_up,
        lambda: engine.measure(engine.buckets[0], 8, num_steps=2),
        lambda: asked[0].submit(engine),
    )
    for call in calls:
        with pytest.raises(EngineError, match="is not usable any more after: INTERNAL"):
            call()
