"""The "seeded" rule: the words of plain decoding, their ends and log-probabilities.

One program serves every limit, stop token and parameter; a drafter may be broken.
"""

import jax
import jax.numpy as jnp
import numpy as np
import plain_rows
import pytest
from plain_rows import LENGTHS, NEW, PROMPTS, SAMPLING, B, P

import dspark_jax
from dspark_jax.config import Speculation
from dspark_jax.types import FINISH_LENGTH, FINISH_NON_FINITE, FINISH_STOP, Generation


@pytest.fixture(scope="module")
def models(golden):
    return plain_rows.load_models(golden)


@pytest.fixture(scope="module")
def plain(golden):
    return plain_rows.generate(golden)


@pytest.fixture(scope="module")
def speculate(models):
    """One program: (limits, stop tokens, changed parameters) -> Generation."""

    @jax.jit
    def run(limits, stop_tokens, target_params, drafter_params):
        return dspark_jax.speculative_generate(
            plain_rows.keys(),
            jnp.asarray(plain_rows.prompts()),
            jnp.asarray(LENGTHS),
            target=models["target"],
            target_params=target_params,
            drafter=models["drafter"],
            drafter_params=drafter_params,
            max_new_tokens=NEW,
            sampling=plain_rows.settings(),
            options=Speculation(rule="seeded"),
            limits=limits,
            stop_tokens=stop_tokens,
            return_logprobs=True,
        )

    def call(limits=None, stop_tokens=None, **changed) -> Generation:
        arrays = {**models, **changed}
        limits = np.full(B, NEW) if limits is None else limits
        stops = np.full((B, 2), -1) if stop_tokens is None else stop_tokens
        return run(
            jnp.asarray(limits, jnp.int32),
            jnp.asarray(stops, jnp.int32),
            arrays["target_params"],
            arrays["drafter_params"],
        )

    return call


def test_words_are_those_of_plain_decoding(speculate, plain):
    found = speculate()
    plain_rows.check_words(found, plain)
    np.testing.assert_array_equal(found.lengths, LENGTHS + NEW)
    np.testing.assert_array_equal(found.finish, FINISH_LENGTH)
    # The prompt stays, and nothing is written beyond the end.
    for row in range(B):
        kept = np.asarray(found.tokens[row])
        np.testing.assert_array_equal(
            kept[: LENGTHS[row]], plain_rows.prompts()[row, : LENGTHS[row]]
        )
        # What follows the end is the input's padding.
        rest = np.zeros(P + NEW, np.int32)
        rest[:P] = plain_rows.prompts()[row]
        end = LENGTHS[row] + NEW
        np.testing.assert_array_equal(kept[end:], rest[end:])
    # Drafts were accepted, and some were not.
    assert 1.2 < found.stats.accepted_length < 5
    assert int(found.stats.num_rounds.max()) < NEW


def test_logprobs_equal_a_teacher_forced_pass(speculate, plain, models):
    found = speculate()
    target, params = models["target"], models["target_params"]

    @jax.jit
    def forward(tokens):
        cache = target.init_cache(*tokens.shape)
        at = jnp.broadcast_to(
            jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape
        )
        return target.unembed(params, target.forward(params, tokens, at, cache)[0])

    logits = np.asarray(forward(found.tokens), np.float64)
    for row in range(B):
        at = np.arange(LENGTHS[row], LENGTHS[row] + NEW)
        x = logits[row, at - 1]
        chosen = np.asarray(found.tokens[row])[at]
        temperature = SAMPLING["temperature"][row]
        y = x / (temperature or 1e-9)
        y = np.where(y >= np.sort(y)[:, -SAMPLING["top_k"][row], None], y, -np.inf)
        p = np.exp(y - y.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        if SAMPLING["top_p"][row] < 1:
            above = (p[:, None] * (p[:, None] > p[:, :, None])).sum(-1)
            p = np.where(above < SAMPLING["top_p"][row], p, 0)
            p /= p.sum(-1, keepdims=True)
        raw = x - np.log(np.exp(x).sum(-1, keepdims=True))
        raw = np.take_along_axis(raw, chosen[:, None], axis=1)[:, 0]
        with np.errstate(divide="ignore"):
            of_sampling = np.log(np.take_along_axis(p, chosen[:, None], axis=1)[:, 0])
        for generation in (found, plain):
            logprobs = generation.logprobs
            np.testing.assert_allclose(logprobs.raw[row, at], raw, atol=1e-4)
            np.testing.assert_allclose(
                logprobs.sampling[row, at], of_sampling, atol=1e-4
            )
            outside = np.delete(np.asarray(logprobs.raw[row]), at)
            np.testing.assert_array_equal(outside, 0)


def test_limits_end_rows_exactly(speculate, plain):
    limits = np.array([0, 1, 2, 23])
    found = speculate(limits=limits)
    plain_rows.check_words(found, plain, limits)
    np.testing.assert_array_equal(found.lengths, LENGTHS + limits)
    np.testing.assert_array_equal(found.finish, FINISH_LENGTH)


def test_stop_tokens_end_rows_and_are_kept(speculate, plain):
    stops = np.full((B, 2), -1)
    counts = []
    for row, index in enumerate((0, 5, 9, 23)):
        text = plain_rows.words(plain, row)
        stops[row, row % 2] = text[index]
        counts.append(list(text).index(text[index]) + 1)
    found = speculate(stop_tokens=stops)
    plain_rows.check_words(found, plain, counts)
    np.testing.assert_array_equal(found.lengths, LENGTHS + counts)
    np.testing.assert_array_equal(found.finish, FINISH_STOP)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 0.0])
def test_broken_drafters_change_nothing_but_speed(speculate, plain, models, value):
    broken = jax.tree.map(
        lambda x: jnp.full_like(x, value) if x.ndim == 2 else x,
        models["drafter_params"],
    )
    plain_rows.check_words(speculate(drafter_params=broken), plain)


def test_nan_in_the_target_fails_its_row_only(speculate, plain, models):
    """A row fails when it reads, writes or drafts such a token; here one only reads."""
    elsewhere = {
        t for row in (0, 1, 3) for t in (*plain_rows.words(plain, row), *PROMPTS[row])
    }
    read = next(t for t in PROMPTS[2] if t not in elsewhere)
    params = models["target_params"]
    poisoned = params.replace(embed=params.embed.at[read].set(np.nan))
    found = speculate(target_params=poisoned)
    plain_rows.check_words(found, plain, [NEW, NEW, 0, NEW])
    finish = [FINISH_LENGTH, FINISH_LENGTH, FINISH_NON_FINITE, FINISH_LENGTH]
    np.testing.assert_array_equal(found.finish, finish)
