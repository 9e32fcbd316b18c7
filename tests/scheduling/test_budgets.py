"""The global search: brute force on jagged tables, its options, and what it may see."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from dspark_jax.scheduling import budgets, planner
from dspark_jax.scheduling.relay import ConfidenceRelay, PastConfidence

STEP = 7


def past_of(confidence, lag=2):
    """What the relay makes of confidences that step 5 drafted, for step 7."""
    confidence = np.asarray(confidence, np.float64)
    rows, length = confidence.shape
    relay = ConfidenceRelay(rows, length, lag=lag)
    for slot in range(rows):
        relay.assign(slot)
    relay.publish(STEP - lag, range(rows), confidence)
    return relay.read(STEP, range(rows))


def choose(confidence, buckets, seconds, **settings):
    seconds = np.asarray(seconds, np.float64)
    past = past_of(confidence)
    return budgets.budget(past, step=STEP, buckets=buckets, seconds=seconds, **settings)


def brute_force(confidence, buckets, seconds, plain_seconds):
    """Highest throughput over all numbers of drafts in the buckets that hold them."""
    survival = np.sort(planner.survival(confidence), axis=None)[::-1]
    rows = len(confidence)
    options = [] if plain_seconds is None else [rows / plain_seconds]
    for count in range(len(survival) + 1):
        tokens = rows + survival[:count].sum()
        options += [
            tokens / cost
            for size, cost in zip(buckets, seconds, strict=True)
            if size >= rows + count
        ]
    return max(options)


probability = st.one_of(
    st.floats(0, 1, width=32), st.sampled_from([0.0, 0.5, 0.9, 1.0])
)
cost = st.floats(0.01, 10)


@st.composite
def worlds(draw):
    rows, length = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    row = st.lists(probability, min_size=length, max_size=length)
    confidence = np.array(draw(st.lists(row, min_size=rows, max_size=rows)))
    buckets = draw(st.lists(st.integers(1, 24), min_size=1, max_size=6, unique=True))
    buckets = sorted({*buckets, rows + draw(st.integers(0, rows * length))})
    seconds = draw(st.lists(cost, min_size=len(buckets), max_size=len(buckets)))
    return confidence, buckets, seconds


@hypothesis.settings(max_examples=500)
@hypothesis.given(worlds(), st.none() | cost)
def test_equal_to_brute_force_on_jagged_tables(world, plain_seconds):
    confidence, buckets, seconds = world
    found = choose(
        confidence,
        buckets,
        seconds,
        plain_seconds=plain_seconds,
        margin=0,
        plain_margin=0,
    )
    wanted = brute_force(confidence, buckets, seconds, plain_seconds)
    assert found.throughput == pytest.approx(wanted, rel=1e-12)
    assert found.throughput == pytest.approx(
        found.expected_tokens / found.seconds, rel=1e-12
    )
    rows = len(confidence)
    if found.is_drafting:
        assert found.packed_tokens in buckets
        assert found.num_drafts == min(found.packed_tokens - rows, confidence.size)
        assert found.seconds == seconds[buckets.index(found.packed_tokens)]
    else:
        assert (found.num_drafts, found.packed_tokens) == (0, rows)
        assert found.seconds == plain_seconds


@hypothesis.settings(max_examples=300)
@hypothesis.given(worlds(), cost, st.floats(0, 0.5), st.floats(0, 0.5))
def test_never_below_a_fixed_choice(world, plain_seconds, margin, plain_margin):
    confidence, buckets, seconds = world
    found = choose(
        confidence,
        buckets,
        seconds,
        plain_seconds=plain_seconds,
        margin=margin,
        plain_margin=plain_margin,
    )
    plain, full = found.plain_throughput, found.full_throughput
    assert plain == len(confidence) / plain_seconds
    if found.is_drafting:
        assert found.throughput > plain * (1 + plain_margin)
        assert found.throughput == full or found.throughput > full * (1 + margin)
    else:  # nothing that could have been chosen beats it by more than the margins
        assert found.throughput == plain >= full / (1 + plain_margin)
        best = brute_force(confidence, buckets, seconds, plain_seconds)
        assert best <= plain * (1 + plain_margin) * (1 + margin)


def test_one_request_on_an_idle_device_verifies_everything():
    found = choose([[0.9, 0.8, 0.7]], [1, 2, 4], [1.0, 1.01, 1.02], plain_seconds=0.9)
    assert (found.num_drafts, found.packed_tokens) == (3, 4)
    assert found.is_drafting


def test_a_busy_device_buys_what_is_worth_its_price():
    confidence = [[0.95, 0.9, 0.1]] * 4 + [[0.2, 0.2, 0.2]] * 4
    # From 16 packed tokens on, every token costs its share.
    found = choose(
        confidence, [8, 16, 24, 32], [1.0, 1.05, 1.5, 2.0], plain_seconds=0.9
    )
    assert (found.packed_tokens, found.num_drafts) == (16, 8)
    assert found.expected_tokens == pytest.approx(8 + 4 * (0.95 + 0.95 * 0.9))
    assert found.seconds == 1.05
    survival = planner.survival(np.array(confidence))
    assert planner.allocate(survival, found.num_drafts).tolist() == [2] * 4 + [0] * 4


def test_a_bad_drafter_is_switched_off_and_probed():
    bad = [[0.05, 0.05]] * 2
    sizes, seconds = [2, 4, 6], [1.1, 1.2, 1.3]
    found = choose(bad, sizes, seconds, plain_seconds=1.0)
    assert not found.is_drafting
    assert (found.num_drafts, found.packed_tokens, found.seconds) == (0, 2, 1.0)
    probe = choose(bad, sizes, seconds, plain_seconds=1.0, must_draft=True)
    assert probe.is_drafting
    assert probe.packed_tokens == 2
    # Without a program for plain steps the smallest bucket drafts and verifies nothing.
    found = choose(bad, sizes, seconds)
    assert (found.is_drafting, found.num_drafts, found.packed_tokens) == (True, 0, 2)
    assert np.isnan(found.plain_throughput)


def test_small_gains_are_left():
    confidence = [[0.9, 0.01]]
    sizes, seconds = [1, 2, 3], [1.0, 1.0, 1.01]  # 1.9 tokens at 1 s, 1.909 at 1.01 s
    assert choose(confidence, sizes, seconds, margin=0).packed_tokens == 2
    assert choose(confidence, sizes, seconds, margin=0.01).packed_tokens == 3


def test_drafting_must_be_worth_its_power():
    def is_drafting(plain_margin):
        found = choose(
            [[0.5]], [2], [1.4], plain_seconds=1.0, plain_margin=plain_margin
        )
        return found.is_drafting  # 1.5 tokens in 1.4 s: 7 % more

    assert is_drafting(0.05)
    assert not is_drafting(0.08)


def test_ties():
    def chosen(seconds, plain_seconds=None):
        return choose(
            [[0.5, 0.0]],
            [1, 2, 3],
            seconds,
            plain_seconds=plain_seconds,
            margin=0,
            plain_margin=0,
        )

    assert chosen([1.0, 1.5, 2.0]).packed_tokens == 1
    assert chosen([1.0, 1.5, 1.5]).packed_tokens == 3
    assert chosen([1.0, 1.5, 1.5], 1.0).is_drafting is False


def test_limits_of_requests_count():
    sizes, seconds = [2, 3, 4, 6], [1.0, 1.1, 1.2, 1.4]
    found = choose([[1.0, 1.0]] * 2, sizes, seconds)
    assert (found.packed_tokens, found.expected_tokens) == (6, 6)
    found = choose([[1.0, 1.0]] * 2, sizes, seconds, max_verify_length=np.array([0, 1]))
    assert (found.packed_tokens, found.expected_tokens) == (3, 3)


def test_tokens_of_others_take_room():
    found = choose([[1.0, 1.0]] * 2, [4, 8], [1.0, 1.1], other_tokens=4)
    assert (found.packed_tokens, found.num_drafts) == (8, 2)


def test_it_sees_past_confidences_only():
    live = np.ones((1, 2))
    call = {"step": STEP, "buckets": [3], "seconds": [1.0]}
    with pytest.raises(TypeError, match="must be a PastConfidence, which Confidence"):
        budgets.budget(live, **call)
    with pytest.raises(TypeError, match=r"is made by ConfidenceRelay\.read only"):
        PastConfidence()
    past = past_of(live)
    assert budgets.budget(past, **call).num_drafts == 2
    # The step that drafted it, or one before: these confidences are live or unborn.
    for step in (past.newest_step, past.newest_step - 1):
        with pytest.raises(ValueError, match=f"one step before step {step}, got conf"):
            budgets.budget(past, **(call | {"step": step}))
    with pytest.raises(ValueError, match="read-only"):
        past.confidence[:] = 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"buckets": []}, r"`buckets` must be integers \(n,\), n >= 1"),
        ({"buckets": [1.5, 2.5]}, "`buckets` must be integers"),
        ({"buckets": [4, 4]}, r"strictly increasing, got \[4, 4\]"),
        ({"buckets": [0, 4]}, "must be positive and strictly"),
        ({"buckets": [1, 2, 3]}, r"one value a bucket, \(3,\), got \(2,\)"),
        ({"buckets": [1, 2]}, r"must hold B \+ other_tokens = 3 tokens, .* holds 2"),
        ({"seconds": [1.0, 0.0]}, "`seconds` and `plain_seconds` must be positive"),
        ({"seconds": [1.0, np.nan]}, "must be positive and finite"),
        ({"plain_seconds": 0.0}, "must be positive and finite"),
        ({"plain_seconds": float("inf")}, "must be positive and finite"),
        ({"margin": -0.1}, "`margin` must be finite and at least 0, got -0.1"),
        (
            {"plain_margin": float("inf")},
            "`plain_margin` must be finite and at least 0, got inf",
        ),
        ({"other_tokens": -1}, "`other_tokens` must be at least 0, got -1"),
        ({"max_verify_length": np.ones(2)}, r"shape \(B,\) = \(3,\), got \(2,\)"),
    ],
)
def test_bad_arguments(settings, message):
    given = {"buckets": [3, 6], "seconds": [1.0, 2.0], **settings}
    with pytest.raises(ValueError, match=message):
        budgets.budget(past_of(np.ones((3, 2))), step=STEP, **given)
