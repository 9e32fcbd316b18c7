"""Algorithm 1: the golden table, brute force on convex costs, the gap on others."""

import itertools
import json

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from dspark_jax.scheduling import planner


def padded(rows):
    width = max(map(len, rows))
    return np.array([[*row, *[0.0] * (width - len(row))] for row in rows])


def golden_cases(golden):
    return json.loads((golden / "tables" / "scheduler.json").read_text())["cases"]


@pytest.mark.parametrize("number", range(11))
def test_the_golden_table_exactly(golden, number):
    case = golden_cases(golden)[number]
    curve = [1.0, *case["sps"][1:]]
    confidence = padded(case["confidences"])
    found = planner.plan(confidence, np.array(curve))
    assert found.verify_length.tolist() == case["lengths"]
    assert found.verify_length.dtype == np.int32
    assert found.throughput == case["theta_best"]
    assert found.visited_throughput.tolist() == case["visited_theta"]
    visited = (found.visited + np.array([0, 1])).tolist()
    survival = planner.survival(confidence)
    kept = [survival[r, k - 1] for r, k in visited]
    assert kept == [survival[r, k - 1] for r, k in case["visited"]]
    # The golden file breaks ties by request, so that orders differ inside a tie.
    assert len(set(map(tuple, visited))) == len(visited)
    if len(set(kept)) == len(kept):
        assert visited == case["visited"]
    everything = brute_force(confidence, np.array(curve))
    assert everything == pytest.approx(case["no_early_stop"]["theta_best"], rel=1e-14)


def brute_force(confidence, curve):
    """Highest throughput over all verify lengths of all requests."""
    survival = planner.survival(confidence)
    rows, length = survival.shape
    sums = np.concatenate([np.zeros((rows, 1)), np.cumsum(survival, axis=1)], axis=1)
    if (length + 1) ** rows > 10_000:  # the best of each total: the highest survivals
        falling = np.sort(survival, axis=None)[::-1]
        falling = falling[falling > 0]
        tokens = rows + np.concatenate([[0], np.cumsum(falling)])
        return np.max(tokens * curve[rows : rows + len(tokens)])
    best = 0.0
    for lengths in itertools.product(range(length + 1), repeat=rows):
        total = rows + sum(lengths)
        if any(survival[r, k - 1] == 0 for r, k in enumerate(lengths) if k):
            continue
        tokens = rows + sum(sums[r, k] for r, k in enumerate(lengths))
        best = max(best, tokens * curve[total])
    return best


probability = st.one_of(
    st.floats(0, 1, width=32), st.sampled_from([0.0, 0.5, 0.9, 1.0])
)


@st.composite
def confidences(draw, max_rows=3, max_length=3):
    rows, length = draw(st.integers(1, max_rows)), draw(st.integers(1, max_length))
    row = st.lists(probability, min_size=length, max_size=length)
    return np.array(draw(st.lists(row, min_size=rows, max_size=rows)))


@hypothesis.settings(max_examples=300)
@hypothesis.given(
    confidences(),
    st.floats(0.01, 10),
    st.lists(st.floats(0, 1), min_size=13, max_size=13),
)
def test_equal_to_brute_force_where_step_time_is_convex(confidence, first, steps):
    # Increments that rise: 0 (memory bound), then more and more.
    seconds = first + np.cumsum([0.0, *np.sort(steps)])
    found = planner.plan(confidence, 1 / seconds)
    assert found.throughput == pytest.approx(
        brute_force(confidence, 1 / seconds), rel=1e-12
    )


@hypothesis.settings(max_examples=300)
@hypothesis.given(
    confidences(), st.lists(st.floats(0.01, 10), min_size=14, max_size=14)
)
def test_never_below_no_drafts_on_any_table(confidence, seconds):
    curve = 1 / np.array(seconds)
    found = planner.plan(confidence, curve)
    rows = len(confidence)
    assert found.throughput >= rows * curve[rows]
    assert found.throughput <= brute_force(confidence, curve) * (1 + 1e-12)
    survival = planner.survival(confidence)
    tokens = rows + sum(
        survival[r, :k].sum() for r, k in enumerate(found.verify_length)
    )
    total = rows + found.verify_length.sum()
    assert found.throughput == pytest.approx(tokens * curve[total], rel=1e-12)


def test_the_gap_on_a_staircase(golden):
    """Where steps get dear all at once, the early stop misses what lies beyond."""
    case = next(c for c in golden_cases(golden) if c["name"] == "six_requests_cliff")
    curve = np.array([1.0, *case["sps"][1:]])
    confidence = padded(case["confidences"])
    found = planner.plan(confidence, curve)
    assert found.throughput == pytest.approx(793.16)  # without drafts: 600
    assert brute_force(confidence, curve) == pytest.approx(1027.38, abs=0.01)


@hypothesis.settings(max_examples=300)
@hypothesis.given(
    confidences(),
    st.lists(st.floats(0.01, 10), min_size=14, max_size=14),
    st.data(),
)
def test_whether_a_slot_is_bought_never_depends_on_what_it_verifies(
    confidence, seconds, data
):
    """{length >= k} is a function of the confidences up to k: those after see x_k."""
    curve = 1 / np.array(seconds)
    row = data.draw(st.integers(0, len(confidence) - 1))
    k = data.draw(st.integers(1, confidence.shape[1]))
    other = confidence.copy()
    other[row, k:] = data.draw(
        st.lists(
            probability, min_size=len(other[row, k:]), max_size=len(other[row, k:])
        )
    )
    before, after = planner.plan(confidence, curve), planner.plan(other, curve)
    is_bought = [plan.verify_length[row] >= k for plan in (before, after)]
    assert is_bought[0] == is_bought[1]


def test_survival():
    confidence = np.array([[0.5, 0.5, 1.0], [np.inf, 1.0, 1.0], [1.0, np.nan, 1.0]])
    assert planner.survival(confidence).tolist() == [
        [0.5, 0.25, 0.25],
        [0, 0, 0],
        [1, 0, 0],
    ]


def test_ties_go_by_slot_then_request():
    confidence = np.ones((2, 2))
    found = planner.plan(confidence, np.ones(7))
    assert found.visited.tolist() == [[0, 0], [1, 0], [0, 1], [1, 1]]
    for budget, lengths in enumerate([[0, 0], [1, 0], [1, 1], [2, 1], [2, 2], [2, 2]]):
        assert planner.allocate(confidence, budget).tolist() == lengths


@hypothesis.settings(max_examples=300)
@hypothesis.given(confidences(max_rows=5, max_length=4), st.integers(0, 25))
def test_allocate_takes_the_highest_survivals(confidence, budget):
    survival = planner.survival(confidence).astype(np.float32)
    found = planner.allocate(survival, budget)
    survival[survival < np.finfo(np.float32).tiny] = 0
    positive = int(np.count_nonzero(survival))
    assert found.sum() == min(budget, positive)
    taken = [survival[r, k] for r, n in enumerate(found) for k in range(n)]
    assert sorted(taken) == sorted(survival.reshape(-1))[survival.size - len(taken) :]


def test_allocate_refuses_what_does_not_survive():
    survival = np.array([[np.nan, 1.0], [0.5, np.inf], [0.5, 0.75], [-1.0, 0.5]])
    assert planner.allocate(survival, 8).tolist() == [0, 1, 2, 0]
    assert planner.allocate(np.zeros((2, 3)), 4).tolist() == [0, 0]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: planner.survival(np.ones(3)),
            r"`confidence` must have shape \(B, K\)",
        ),
        (lambda: planner.survival(np.ones((0, 3))), "B >= 1, got"),
        (
            lambda: planner.survival(np.full((1, 1), 1.5)),
            r"must lie in \[0, 1\], got 1.5",
        ),
        (
            lambda: planner.survival(np.full((1, 1), -0.5)),
            r"must lie in \[0, 1\], got -0.5",
        ),
        (
            lambda: planner.plan(np.ones((2, 3)), np.ones(8)),
            r"n > B \+ slots = 8, got \(8,\)",
        ),
        (
            lambda: planner.plan(np.ones((1, 1)), np.array([1.0, 0.0, 1.0])),
            "must be positive and finite from index B on, got 0.0",
        ),
        (
            lambda: planner.plan(np.ones((1, 1)), np.array([1.0, 1.0, np.nan])),
            "must be positive and finite from index B on, got nan",
        ),
        (
            lambda: planner.allocate(np.ones(3), 1),
            r"`survival` must have shape \(B, K\)",
        ),
        (lambda: planner.allocate(np.ones((1, 3)), -1), "`budget` must be at least 0"),
    ],
)
def test_bad_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call()
