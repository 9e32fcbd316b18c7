"""The ranking inside the step: equal to its reference on the host, and its slots."""

import functools

import chex
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.decoding import windows
from dspark_jax.scheduling import planner

allocate = jax.jit(windows.allocate)
level = st.sampled_from([0.0, 0.25, 0.5, 1.0, 1e-40, -0.5, np.nan, np.inf, -np.inf])
value = st.one_of(st.floats(0, 1, width=32), level)


@st.composite
def survivals(draw):
    rows, length = draw(st.sampled_from([(1, 1), (1, 4), (3, 2), (5, 3)]))
    flat = draw(st.lists(value, min_size=rows * length, max_size=rows * length))
    survival = np.array(flat, np.float32).reshape(rows, length)
    if draw(st.booleans()):
        survival = np.minimum.accumulate(np.nan_to_num(survival), axis=1)
    return survival


@hypothesis.settings(max_examples=500)
@hypothesis.given(survivals(), st.integers(0, 20))
def test_equal_to_the_reference_on_the_host(survival, budget):
    found = allocate(jnp.asarray(survival), jnp.int32(budget))
    assert found.dtype == jnp.int32
    wanted = planner.allocate(survival, budget)
    np.testing.assert_array_equal(found, wanted)
    assert found.sum() <= budget


def test_ties_in_a_large_batch():
    random = np.random.default_rng(0)
    confidence = random.choice([0.5, 1.0, 0.0], (128, 15), p=[0.4, 0.58, 0.02])
    survival = planner.survival(confidence).astype(np.float32)
    for budget in (0, 1, 100, 500, 1000, 1920):
        found = allocate(jnp.asarray(survival), jnp.int32(budget))
        np.testing.assert_array_equal(found, planner.allocate(survival, budget))


def test_one_program_serves_every_budget():
    traced = chex.assert_max_traces(windows.allocate, n=1)
    program = jax.jit(functools.partial(traced))
    survival = jnp.asarray([[0.5, 0.25], [0.75, 0.5]])
    lengths = [program(survival, jnp.int32(n)).tolist() for n in range(-1, 6)]
    assert lengths == [[0, 0], [0, 0], [0, 1], [1, 1], [1, 2], [2, 2], [2, 2]]
    chex.clear_trace_counter()


def test_later_slots_never_change_whether_a_slot_wins():
    random = np.random.default_rng(1)
    for _ in range(200):
        confidence = random.choice([0.0, 0.3, 0.9, 1.0], (3, 3))
        budget = jnp.int32(random.integers(0, 10))
        row, k = random.integers(0, 3), random.integers(1, 4)
        other = confidence.copy()
        other[row, k:] = random.choice([0.0, 0.3, 0.9, 1.0], 3 - k)
        wins = [
            int(allocate(jnp.asarray(planner.survival(c), jnp.float32), budget)[row])
            >= k
            for c in (confidence, other)
        ]
        assert wins[0] == wins[1]
