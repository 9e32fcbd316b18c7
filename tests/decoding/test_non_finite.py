"""Target logits that are not finite: a row fails where plain decoding fails.

A table target on three tokens, whose logits are not finite after some pairs of tokens.
The law of (words, reason) is enumerated; failing is one more outcome.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import table_models

import dspark_jax
from dspark_jax.config import RULES, Speculation
from dspark_jax.sampling import Sampling
from dspark_jax.types import FINISH_LENGTH, FINISH_NON_FINITE, FINISH_STOP

V, K, NEW, RUNS = 3, 3, 4, 40_000
PROMPT = (2, 0)
STOP = 2
BAD = {(1, 1): np.nan, (0, 2): np.inf, (1, 0): -np.inf}  # the last two tokens


def make_tables():
    rng = np.random.default_rng(5)
    target = rng.normal(size=(V, V, V)).astype(np.float32)
    for pair, value in BAD.items():
        target[pair] = value if value < 0 else np.where(np.arange(V) == 1, value, 0)
    drafter = table_models.DrafterTables(
        logits=jnp.asarray(target + 0.5 * rng.normal(size=(K, V, V, V)), jnp.float32),
        confidence_logits=jnp.zeros((K, V), jnp.float32),
        look_ahead=jnp.zeros((), jnp.int32),
    )
    return jnp.asarray(target), drafter


@functools.partial(jax.jit, static_argnames=("rule", "is_plain", "is_greedy"))
def run(stop_tokens, *, rule="token", is_plain=False, is_greedy=False):
    target_params, drafter_params = make_tables()
    shared = {
        "target": table_models.make_target(V),
        "target_params": target_params,
        "max_new_tokens": NEW,
        "sampling": Sampling(temperature=None if is_greedy else 1.0),
        "stop_tokens": stop_tokens,
    }
    prompts = jnp.broadcast_to(jnp.asarray(PROMPT, jnp.int32), (RUNS, len(PROMPT)))
    lengths = jnp.full((RUNS,), len(PROMPT), jnp.int32)
    keys = jax.random.split(jax.random.key(3), RUNS)
    if is_plain or rule == "plain":
        return dspark_jax.autoregressive_generate(keys, prompts, lengths, **shared)
    return dspark_jax.speculative_generate(
        keys,
        prompts,
        lengths,
        drafter=table_models.make_drafter(V, K),
        drafter_params=drafter_params,
        options=Speculation(rule=rule),
        **shared,
    )


def outcomes(generation):
    """(words, reason) -> how often."""
    tokens = np.asarray(generation.tokens)[:, len(PROMPT) :]
    lengths = np.asarray(generation.lengths) - len(PROMPT)
    tokens = np.where(np.arange(NEW) < lengths[:, None], tokens, -1)
    rows = np.column_stack([tokens, np.asarray(generation.finish)])
    return {
        tuple(row.tolist()): int(count)
        for row, count in zip(*np.unique(rows, axis=0, return_counts=True), strict=True)
    }


def exact_law(has_stop):
    """The same outcomes of plain decoding, enumerated."""
    tables = np.asarray(make_tables()[0], np.float64)
    law = {}

    def extend(words, mass):
        def end(reason):
            padded = (*words, *[-1] * (NEW - len(words)), reason)
            law[padded] = law.get(padded, 0.0) + mass

        if words and has_stop and words[-1] == STOP:
            return end(FINISH_STOP)
        if len(words) == NEW:
            return end(FINISH_LENGTH)
        pair = (*PROMPT, *words)[-2:]
        if pair in BAD:
            return end(FINISH_NON_FINITE)
        weights = np.exp(tables[pair])
        for token, p in enumerate(weights / weights.sum()):
            extend((*words, token), mass * p)

    extend((), 1.0)
    return law


@pytest.mark.parametrize("has_stop", [False, True])
@pytest.mark.parametrize("rule", [*RULES, "plain"])
def test_the_law_of_words_and_reasons(rule, has_stop):
    law = exact_law(has_stop)
    reasons = {outcome[-1] for outcome in law}
    assert FINISH_NON_FINITE in reasons
    assert FINISH_LENGTH in reasons
    found = outcomes(run(jnp.asarray([STOP if has_stop else -1]), rule=rule))
    assert set(found) <= set(law)
    expected = np.array([RUNS * mass for mass in law.values()])
    counts = np.array([found.get(outcome, 0) for outcome in law])
    assert expected.min() > 5
    chi2 = np.sum((counts - expected) ** 2 / expected)
    freedom = len(law) - 1
    assert abs(chi2 - freedom) < 5 * np.sqrt(2 * freedom)


@pytest.mark.parametrize(
    ("rule", "is_greedy"), [("seeded", False), *itertools.product(RULES, [True])]
)
def test_the_words_are_those_of_plain_decoding(rule, is_greedy):
    stops = jnp.asarray([-1])
    plain = run(stops, is_plain=True, is_greedy=is_greedy)
    found = run(stops, rule=rule, is_greedy=is_greedy)
    np.testing.assert_array_equal(found.lengths, plain.lengths)
    np.testing.assert_array_equal(found.finish, plain.finish)
    if is_greedy:  # The first round commits a draft, fails and is not counted.
        np.testing.assert_array_equal(found.lengths, len(PROMPT) + 2)
        np.testing.assert_array_equal(found.stats.num_rounds, 0)
    is_new = np.arange(found.tokens.shape[1]) < np.asarray(plain.lengths)[:, None]
    np.testing.assert_array_equal(
        np.where(is_new, found.tokens, -1), np.where(is_new, plain.tokens, -1)
    )


def test_a_full_row_does_not_fail():
    """Nothing is drawn, so that it does not matter that nothing could be."""
    target_params, _ = make_tables()
    generation = dspark_jax.autoregressive_generate(
        jax.random.key(0),
        jnp.asarray([[1, 1], [1, 1]], jnp.int32),
        jnp.asarray([2, 2], jnp.int32),
        target=table_models.make_target(V),
        target_params=target_params,
        max_new_tokens=2,
        limits=jnp.asarray([0, 2], jnp.int32),
    )
    np.testing.assert_array_equal(generation.lengths, [2, 2])
    np.testing.assert_array_equal(generation.finish, [FINISH_LENGTH, FINISH_NON_FINITE])
