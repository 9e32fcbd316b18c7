"""The clock: loops in turn, ratios against plain decoding, the same words."""

import re

import jax
import pytest

import dspark_jax
from dspark_jax.config import Speculation
from dspark_jax.evaluation import timing

pytestmark = pytest.mark.usefixtures("quick_compilation")

GROUPS = [[[1, 2, 3], [4]], [[5, 6], [7, 8, 9, 1]]]


@pytest.fixture
def clock(models, monkeypatch):
    """`compare`, and the order in which things ran."""
    ran = []
    run = timing._Program.run

    def watched(self, *inputs):
        ran.append(self.name)
        return run(self, *inputs)

    make = timing._Program.__init__

    def named(self, loop, *arguments):
        make(self, loop, *arguments)
        self.name = "plain" if loop.drafter is None else loop.options.rule

    monkeypatch.setattr(timing._Program, "run", watched)
    monkeypatch.setattr(timing._Program, "__init__", named)

    def compare(loops, groups=GROUPS, **settings):
        return timing.compare(
            loops,
            groups,
            target=models.target,
            target_params=models.target_params,
            key=jax.random.key(0),
            max_new_tokens=9,
            **settings,
        )

    return compare, ran


def test_loops_take_turns(models, clock):
    compare, ran = clock
    loop = timing.Loop(
        models.drafter, models.drafter_params, Speculation(rule="seeded")
    )
    asked, lines = [], []

    def other(group):
        asked.append(group)
        return 0.5

    found = compare(
        {"ours": loop},
        temperature=0.8,
        repeats=2,
        others={"peer": other},
        log=lines.append,
    )
    assert list(found) == ["plain", "ours", "peer"]
    assert ran == ["plain", "seeded"] * 5  # one more of the first group: it compiles
    assert asked == [GROUPS[0]] * 3 + [GROUPS[1]] * 2
    assert len(lines) == 2
    plain, ours, peer = found.values()
    assert plain.speedup_over_plain_median == plain.speedup_over_plain_total == 1
    assert plain.num_equal == ours.num_equal == 4  # seeded: plain decoding's words
    assert plain.accepted_length is None
    assert 1 <= ours.accepted_length <= 5
    assert len(ours.seconds) == len(ours.whole_seconds) == 2
    ratios = [a / b for a, b in zip(plain.seconds, ours.seconds, strict=True)]
    assert min(ratios) <= ours.speedup_over_plain_median <= max(ratios)
    # 8 tokens a row after the prefill's, two rows, half a second.
    assert peer.tokens_per_second == pytest.approx(32)
    assert peer.ms_per_token == pytest.approx(500 / 8)
    assert peer.whole_seconds is None
    assert peer.num_equal is None


@pytest.mark.parametrize(
    ("loops", "groups", "message"),
    [
        ({"plain": None}, GROUPS, "`loops` must not name 'plain'"),
        ({}, [], "`groups` must hold batches of one size, at least 1, got sizes []"),
        ({}, [[[1]], [[1], [2]]], "at least 1, got sizes [1, 2]"),
    ],
)
def test_bad_arguments(clock, loops, groups, message):
    compare, _ = clock
    with pytest.raises(ValueError, match=re.escape(message)):
        compare(loops, groups)


def test_prompt_lookup_is_a_loop(models, clock):
    compare, _ = clock
    lookup = timing.Loop(*dspark_jax.make_prompt_lookup(2), Speculation())
    found = compare({"lookup": lookup}, GROUPS[:1], repeats=1)
    assert found["lookup"].num_equal == 2
