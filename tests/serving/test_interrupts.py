"""Ctrl-C at any line of the engine's books: nothing is lost, leaked or said wrongly."""

import pathlib
import sys

import engine_books
import pytest

from dspark_jax import serving

FILES = ("slots", "pages", "requests", "loop", "feeding", "results", "engine")
PATHS = {str(pathlib.Path(serving.__file__).with_name(f"{name}.py")) for name in FILES}
ASKED = ((5, 9, 0), (11, 6, 1), (3, 12, 2), (7, 4, 3), (2, 14, 4))  # prompt, new, seed
STRIDE = 29  # every so many lines; all of them take minutes


class Interrupter:
    """Raises KeyboardInterrupt at the line of the engine that is `number` lines on."""

    def __init__(self, number):
        self.left, self.place = number, None

    def __enter__(self):
        sys.settrace(self._call)

    def __exit__(self, *_):
        sys.settrace(None)

    def _call(self, frame, event, _):
        return self._line if frame.f_code.co_filename in PATHS else None

    def _line(self, frame, event, _):
        if event == "line" and self.place is None:
            self.left -= 1
            if self.left < 0:
                self.place = (frame.f_code.co_name, frame.f_lineno)
                raise KeyboardInterrupt
        return self._line


def submit_all(engine):
    return [
        engine.submit([seed + 1] * length, max_new_tokens=new, seed=seed)
        for length, new, seed in ASKED
    ]


def run_with_interrupt(engine, number):
    """Requests of a run that is interrupted once, how it was, and where."""
    handles = submit_all(engine)
    interrupter = Interrupter(number)
    for _ in range(1000):
        try:
            with interrupter:
                is_going = engine.step()
        except KeyboardInterrupt:
            is_going = True
        engine_books.check(engine, handles)
        if not is_going:
            return handles, interrupter.place
    raise AssertionError(f"it never ends after {interrupter.place}: {handles}")


@pytest.mark.parametrize("mode", ["plain", "static"])
def test_an_interrupt_at_any_line(mode, make_engine):
    engine = make_engine(mode, rule="seeded", num_slots=3, page_size=4, num_pages=11)
    engine.warm_up()
    handles = submit_all(engine)
    engine.run()
    words = [handle.tokens for handle in handles]
    places, number, num_ended = set(), 0, 0
    while True:
        handles, place = run_with_interrupt(engine, number)
        for handle, right in zip(handles, words, strict=True):
            assert handle.is_done, place
            if handle.finish_reason == "error":
                assert isinstance(handle.error, KeyboardInterrupt), place
                assert handle.tokens == right[: len(handle.tokens)], place
                num_ended += 1
            else:
                assert handle.tokens == right, place
        assert engine.metrics()["num_free_pages"] == 11, place
        if place is None:  # the run was over before
            break
        places.add(place)
        number += STRIDE
    assert len({name for name, _ in places}) > 20
    assert 0 < num_ended < 3 * number / STRIDE  # of the five requests of each run


def test_an_interrupt_while_another_is_handled(make_engine, monkeypatch):
    engine = make_engine("plain", rule="seeded", num_slots=3, page_size=4, num_pages=11)
    handles = submit_all(engine)
    engine.step()
    table = engine._loop.slots

    def interrupted():
        table._clear()
        raise KeyboardInterrupt

    monkeypatch.setattr(engine._loop, "_feed", interrupted)
    monkeypatch.setattr(table, "start_over", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    monkeypatch.undo()
    assert not engine.is_idle
    engine.run()
    engine_books.check(engine, handles)
    assert all(handle.is_done for handle in handles)
    assert engine.is_idle
