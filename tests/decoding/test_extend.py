"""`extend`: the next turn of a conversation, and turns of no tokens."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dspark_jax
from dspark_jax import testing
from dspark_jax.config import Speculation
from dspark_jax.sampling import Sampling
from dspark_jax.types import FINISH_LENGTH, FINISH_STOP

PROMPTS = np.array([[3, 1, 4, 1, 5], [9, 2, 6, 0, 0]], np.int32)
LENGTHS = np.array([5, 3], np.int32)
FIRST, REST, TURN = 4, 7, 3


@pytest.fixture(scope="module")
def models():
    return testing.make_tiny_models()


def shared(models, is_plain):
    values = {
        "target": models.target,
        "target_params": models.target_params,
        "drafter": None if is_plain else models.drafter,
        "drafter_params": None if is_plain else models.drafter_params,
        "sampling": Sampling(temperature=0.8),
    }
    return values | ({} if is_plain else {"options": Speculation(rule="seeded")})


def finish(state, arguments, stop_tokens):
    """Runs until all rows are done."""
    arguments = {**arguments, "stop_tokens": stop_tokens}
    if arguments["drafter"] is None:
        del arguments["drafter"], arguments["drafter_params"]
        return dspark_jax.autoregressive_steps(state, None, **arguments)
    return dspark_jax.speculative_rounds(state, None, **arguments)


@pytest.fixture(scope="module", params=[False, True], ids=["speculative", "plain"])
def programs(models, request):
    """(the whole text at once, the same in two turns), jitted."""
    arguments = shared(models, is_plain=request.param)
    begin = functools.partial(
        dspark_jax.prefill,
        jax.random.split(jax.random.key(2), 2),
        jnp.asarray(PROMPTS),
        jnp.asarray(LENGTHS),
        capacity=PROMPTS.shape[1] + FIRST + TURN + REST,
        **arguments,
    )

    @jax.jit
    def whole():
        state = begin(max_new_tokens=FIRST + REST, stop_tokens=())
        return finish(state, arguments, ())

    @jax.jit
    def in_turns(stop_tokens, tokens, lengths):
        state = begin(max_new_tokens=FIRST, stop_tokens=stop_tokens)
        first = finish(state, arguments, stop_tokens)
        state = dspark_jax.extend(
            first, tokens, lengths, max_new_tokens=REST, stop_tokens=(), **arguments
        )
        return first, finish(state, arguments, ())

    return whole, in_turns


def test_a_turn_of_no_tokens_goes_on_with_the_text(programs):
    whole, in_turns = programs
    want = whole()
    # Row 0 ends at a stop token, row 1 at its limit.
    stop = np.asarray(want.tokens)[0, LENGTHS[0] + 1]
    assert stop not in np.asarray(want.tokens)[1, LENGTHS[1] : LENGTHS[1] + FIRST]
    no_tokens = np.zeros((2, TURN), np.int32), np.zeros((2,), np.int32)
    first, got = in_turns(jnp.asarray([stop]), *no_tokens)
    np.testing.assert_array_equal(first.finish, [FINISH_STOP, FINISH_LENGTH])
    np.testing.assert_array_equal(got.finish, FINISH_LENGTH)
    for row in range(2):
        end = int(got.lengths[row])
        assert end == int(first.lengths[row]) + REST
        np.testing.assert_array_equal(
            np.asarray(got.tokens)[row, : min(end, int(want.lengths[row]))],
            np.asarray(want.tokens)[row, : min(end, int(want.lengths[row]))],
        )


def test_turns_equal_one_longer_prompt(models, programs):
    _, in_turns = programs
    turn = np.array([[7, 8, 0], [2, 11, 5]], np.int32)
    counts = np.array([2, 3], np.int32)
    first, got = in_turns(jnp.asarray([-1]), turn, counts)
    prompts = np.zeros((2, int(first.lengths.max()) + TURN), np.int32)
    for row in range(2):
        n = int(first.lengths[row])
        prompts[row, :n] = np.asarray(first.tokens)[row, :n]
        prompts[row, n : n + counts[row]] = turn[row, : counts[row]]
    want = dspark_jax.autoregressive_generate(
        jax.random.split(jax.random.key(2), 2),
        jnp.asarray(prompts),
        first.lengths + counts,
        target=models.target,
        target_params=models.target_params,
        max_new_tokens=REST,
        sampling=Sampling(temperature=0.8),
        stop_tokens=(),
    )
    np.testing.assert_array_equal(got.lengths, want.lengths)
    for row in range(2):
        end = int(want.lengths[row])
        np.testing.assert_array_equal(
            np.asarray(got.tokens)[row, :end], np.asarray(want.tokens)[row, :end]
        )
