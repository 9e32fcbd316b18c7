"""When prompts are fed: all that wait, oldest first, and nobody starves."""

import dataclasses

import pytest

from dspark_jax.serving import EngineConfig, feeding
from dspark_jax.serving.requests import DECODING, PREFILLING

CHUNK, GROUPS = 4, 8


@dataclasses.dataclass(eq=False)
class Request:
    """What feeding reads and writes of a request."""

    length: int
    _status: str = PREFILLING
    _num_fed: int = 0
    tokens: tuple[int, ...] = ()

    @property
    def _feed_length(self):
        return self.length


class Slots:
    def __init__(self, requests):
        self.requests = requests

    @property
    def prefilling(self):
        return [r for r in self.requests if r._status == PREFILLING]

    @property
    def decoding(self):
        return [r for r in self.requests if r._status == DECODING]


def make_feeder(lengths, num_decoding=0, **fields):
    requests = [Request(1, DECODING) for _ in range(num_decoding)]
    requests += [Request(length) for length in lengths]
    config = EngineConfig(chunk=CHUNK, prefill_groups=GROUPS, **fields)
    return feeding.Feeder(config, Slots(requests)), requests


def turn(feeder):
    """The prefill steps before the next round."""
    steps = []
    while pieces := feeder.next_pieces(len(steps)):
        steps.append(pieces)
    return steps


def test_all_that_wait_are_fed_before_the_next_round_oldest_first():
    feeder, requests = make_feeder([9, 4, 1, 30, 2])
    steps = turn(feeder)
    assert [len(pieces) for pieces in steps] == [8, 6]
    fed = [piece for pieces in steps for piece in pieces]
    assert [requests.index(piece.request) for piece in fed] == (
        [0] * 3 + [1] + [2] + [3] * 8 + [4]
    )
    for request in requests:
        pieces = [piece for piece in fed if piece.request is request]
        ends = [piece.first + piece.count for piece in pieces]
        assert [piece.first for piece in pieces] == [0, *ends[:-1]]
        assert ends[-1] == request.length
        assert max(piece.count for piece in pieces) <= CHUNK
        assert [piece.draws for piece in pieces] == [False] * (len(pieces) - 1) + [True]
        assert request._status == DECODING
    assert turn(feeder) == []


def test_a_resumed_request_draws_nothing():
    feeder, requests = make_feeder([3])
    requests[0].tokens = (7,)
    ((piece,),) = turn(feeder)
    assert not piece.draws


def test_words_of_others_wait_for_so_many_prefill_steps_only():
    feeder, _ = make_feeder([4] * 40, num_decoding=3, max_prefill_steps=2)
    assert [len(turn(feeder)) for _ in range(4)] == [2, 2, 1, 0]


def test_while_nobody_decodes_there_is_no_limit():
    feeder, requests = make_feeder([4 * GROUPS * 5], max_prefill_steps=2)
    assert len(turn(feeder)) == 5
    assert requests[0]._status == DECODING


@pytest.mark.parametrize("delay", [0, 1, 3])
def test_a_step_with_room_left_is_put_off_while_many_decode(delay):
    feeder, _ = make_feeder([4], num_decoding=8, max_prefill_delay=delay)
    turns = [len(turn(feeder)) for _ in range(5)]
    assert turns == [0] * delay + [1] + [0] * (4 - delay)


def test_the_delay_counts_rounds_not_calls():
    feeder, _ = make_feeder([4], num_decoding=8, max_prefill_delay=4, rounds_per_step=3)
    # One call's three rounds; three more would be six.
    assert [len(turn(feeder)) for _ in range(3)] == [0, 1, 0]


def test_what_comes_meanwhile_shares_the_step():
    feeder, requests = make_feeder([4], num_decoding=60)
    assert turn(feeder) == []
    requests += [Request(4) for _ in range(GROUPS - 2)]
    assert turn(feeder) == []
    requests.append(Request(4))
    (pieces,) = turn(feeder)  # full
    assert [piece.request for piece in pieces] == requests[60:]
    # A new one may be put off as long again.
    requests.append(Request(4))
    assert [len(turn(feeder)) for _ in range(5)] == [0, 0, 0, 0, 1]


def test_what_full_steps_leave_is_put_off_too():
    feeder, requests = make_feeder([4] * 10, num_decoding=60)
    (pieces,) = turn(feeder)
    assert [piece.request for piece in pieces] == requests[60:68]
    assert [len(turn(feeder)) for _ in range(4)] == [0, 0, 0, 1]


def test_few_that_decode_do_not_keep_one_waiting():
    feeder, _ = make_feeder([4], num_decoding=7)
    assert len(turn(feeder)) == 1


@pytest.mark.parametrize("mode", ["plain", "static", "compact"])
def test_several_prefill_steps_a_turn_change_no_word(mode, make_engine, asked):
    engine = make_engine(mode, num_slots=8, prefill_groups=1, max_prefill_steps=3)
    handles = [want.submit(engine) for want in asked]
    engine.step()
    assert len(engine._loop.in_flight) == 4  # three and a round
    engine.run()
    for handle, want in zip(handles, asked, strict=True):
        want.check(handle)
    # Older ones got their first word first.
    first_tokens = [handle.first_token_at for handle in handles]
    assert first_tokens == sorted(first_tokens)
    prefill = engine.metrics()["steps"]["prefill 1"]
    assert prefill["request_utilisation"] == 1
    assert prefill["num_steps"] == sum(-(-len(want.prompt) // 4) for want in asked)
