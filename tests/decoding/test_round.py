"""What a round leaves behind: the invariant of the drafter's state, and its counts."""

import functools

import jax
import numpy as np
import pytest

import dspark_jax
from dspark_jax import testing
from dspark_jax.sampling import Sampling

PROMPTS = np.random.default_rng(0).integers(0, 6, (16, 12), np.int32)
LENGTHS = np.arange(16, dtype=np.int32) % 7 + 6
K, NEW, STOP = 3, 12, 4


@pytest.fixture(scope="module")
def rounds():
    """States after every round, and what each round reported."""
    models = testing.make_tiny_models(vocab_size=6)
    drafter, drafter_params = dspark_jax.make_prompt_lookup(K)
    arguments = {
        "target": models.target,
        "target_params": models.target_params,
        "drafter": drafter,
        "drafter_params": drafter_params,
        "sampling": Sampling(temperature=1.0),
        "stop_tokens": (STOP,),
    }
    prefill = jax.jit(
        functools.partial(
            dspark_jax.prefill,
            capacity=PROMPTS.shape[1] + NEW,
            max_new_tokens=NEW,
            **arguments,
        )
    )
    step = jax.jit(functools.partial(dspark_jax.speculative_round, **arguments))
    states, infos = [], []
    for seed in range(8):
        state = prefill(jax.random.key(seed), PROMPTS, LENGTHS)
        states.append([jax.device_get(state)])
        infos.append([])
        while not state.is_done.all():
            state, info = step(state)
            states[-1].append(jax.device_get(state))
            infos[-1].append(jax.device_get(info))
    return states, infos


def test_the_drafter_saw_exactly_the_tokens_before_the_anchor(rounds):
    for state in (state for run in rounds[0] for state in run):
        index = np.arange(state.tokens.shape[1])
        is_before = index < state.lengths[:, None] - 1
        np.testing.assert_array_equal(
            state.drafter_state, np.where(is_before, state.tokens, -1)
        )


def test_counts_are_those_of_the_rounds(rounds):
    num_ended = 0
    for states, infos in zip(*rounds, strict=True):
        stats = states[-1].stats
        wanted = {name: np.zeros_like(x) for name, x in vars(stats).items()}
        for before, after, info in zip(states, states[1:], infos, strict=False):
            for row in np.flatnonzero(~before.is_done):
                window = info.verify_length[row]
                accepted = info.num_accepted[row]
                new = after.tokens[row, before.lengths[row] : after.lengths[row]]
                # A stop token among the accepted drafts leaves no next token.
                is_ended = new[-1] == STOP and len(new) <= accepted
                num_ended += is_ended
                wanted["num_rounds"][row] += 1
                wanted["num_verified"][row] += window
                wanted["num_accepted"][row] += accepted
                wanted["accepted_sum"][row] += accepted + (not is_ended)
                wanted["verified_at"][row, :window] += 1
                wanted["reached_at"][row, : min(window, accepted + 1)] += 1
                wanted["accepted_at"][row, :accepted] += 1
        for name, want in wanted.items():
            np.testing.assert_array_equal(getattr(stats, name), want, name)
    assert num_ended > 0
    total = sum(run[-1].stats.num_accepted.sum() for run in rounds[0])
    assert total > 20  # the rounds did accept drafts


def test_windows_end_at_a_drafted_stop_and_leave_room_for_the_next_token(rounds):
    num_full = num_stopped = 0
    for states, infos in zip(*rounds, strict=True):
        for before, info in zip(states, infos, strict=False):
            room = before.limits - before.lengths - 1
            is_stop = info.draft.tokens == STOP
            first_stop = np.where(is_stop.any(1), is_stop.argmax(1) + 1, K)
            want = np.minimum(np.minimum(info.draft.length, first_stop), room)
            np.testing.assert_array_equal(
                info.verify_length, np.where(before.is_done, 0, want)
            )
            num_full += np.sum(~before.is_done & (room < info.draft.length))
            num_stopped += np.sum(~before.is_done & (first_stop < info.draft.length))
    assert num_full > 5
    assert num_stopped > 5
