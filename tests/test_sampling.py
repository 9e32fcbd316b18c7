"""Sampling: rows, probabilities and draws against a sort-based float64 reference."""

import re

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from dspark_jax import noise, sampling
from dspark_jax.sampling import Sampling

B, V = 6, 12
NEUTRAL = {"top_k": V, "top_p": 1.0, "min_p": 0.0}


def reference(logits, temperature, top_k, top_p, min_p):
    """p of one row in Hugging Face's order, ties together, by sorting; and its margin.

    The margin is how near any token is to being cut otherwise: no test below 1e-5.
    """
    if temperature == 0:
        return np.eye(len(logits))[np.argmax(logits)], 1.0
    x = logits.astype(np.float64) / temperature
    x = x - x.max()
    margin = 1.0
    if top_k < len(x):
        x = np.where(x >= np.sort(x)[-top_k], x, -np.inf)
    p = np.exp(x) / np.exp(x).sum()
    if top_p < 1:
        values = np.unique(p)
        above = np.array([p[p > value].sum() for value in values])
        margin = min(margin, np.abs(above - top_p).min())
        x = np.where(np.isin(p, values[above < top_p]), x, -np.inf)
        p = np.exp(x) / np.exp(x).sum()
    if min_p > 0:
        margin = min(margin, np.abs(p / p.max() - min_p)[p < p.max()].min(initial=1))
        x = np.where(p >= min_p * p.max(), x, -np.inf)
        p = np.exp(x) / np.exp(x).sum()
    return p, margin


@jax.jit
def evaluate(logits, settings, gumbel):
    row = sampling.make_row(logits, settings)
    ids = jnp.broadcast_to(jnp.arange(logits.shape[-1], dtype=jnp.int32), logits.shape)
    p = sampling.probability(logits, ids, row, settings.temperature)
    index = sampling.draw(logits, row, settings.temperature, gumbel)
    logit = jnp.take_along_axis(logits, index[:, None], axis=1)[:, 0]
    log_p = sampling.log_probability(logit, row, settings.temperature)
    return p, index, log_p, row


def settings_of(rows):
    """Sampling with arrays [B] from a list of dicts."""
    types = {
        "temperature": jnp.float32,
        "top_k": jnp.int32,
        "top_p": jnp.float32,
        "min_p": jnp.float32,
    }
    return Sampling(
        **{k: jnp.asarray([r[k] for r in rows], t) for k, t in types.items()}
    )


def check_rows(logits, rows, seed=0):
    rng = np.random.default_rng(seed)
    gumbel = jnp.asarray(rng.gumbel(size=logits.shape), jnp.float32)
    p, index, log_p, _ = evaluate(jnp.asarray(logits), settings_of(rows), gumbel)
    for b, row in enumerate(rows):
        expected, margin = reference(logits[b], **row)
        if margin < 1e-5:
            continue
        # The log-normaliser is a float32 as large as the largest logit / T.
        largest = np.abs(logits[b][np.isfinite(logits[b])]).max()
        atol = 1e-6 + 1.2e-7 * largest / (row["temperature"] or 1)
        np.testing.assert_allclose(p[b], expected, atol=atol)
        np.testing.assert_array_equal(np.asarray(p[b]) > 1e-30, expected > 1e-30)
        assert expected[int(index[b])] > 0
        if row["temperature"] == 0:
            assert int(index[b]) == np.argmax(logits[b])
        np.testing.assert_allclose(
            np.exp(np.float64(log_p[b])), expected[int(index[b])], atol=atol
        )


ROW = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.3, 0.7, 1.0, 1.9]),
        "top_k": st.sampled_from([1, 2, 3, 5, V - 1, V, V + 5, 10**6]),
        "top_p": st.one_of(st.just(1.0), st.floats(2**-10, 1.0, width=32)),
        "min_p": st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0, 1, width=32)),
    }
)
LOGIT = st.one_of(st.integers(-8, 8).map(lambda n: n / 4), st.floats(-20, 20, width=32))


@hypothesis.settings(max_examples=60)
@hypothesis.given(
    logits=st.lists(st.lists(LOGIT, min_size=V, max_size=V), min_size=B, max_size=B),
    rows=st.lists(ROW, min_size=B, max_size=B),
)
def test_rows_are_those_of_a_sort(logits, rows):
    check_rows(np.asarray(logits, np.float32), rows)


@pytest.mark.parametrize(
    "change",
    [
        {"temperature": 0.0},
        {"temperature": 1e-3},
        {"temperature": 100.0},
        {"top_k": 1},
        {"top_k": V},
        {"top_k": V + 1},
        {"top_p": 1e-6},
        {"top_p": 0.999999},
        {"min_p": 1.0},
        {"temperature": 0.5, "top_k": 4, "top_p": 0.6, "min_p": 0.2},
    ],
)
def test_edges_and_ties(change):
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(B, V)).astype(np.float32)
    logits[1] = 0.5  # every token tied
    logits[2] = np.repeat([3.0, 1.0, 1.0, -2.0], 3)
    logits[3, ::2] = -np.inf
    logits[4] = np.where(np.arange(V) == 7, 4.0, -np.inf)
    logits[5] *= 40
    check_rows(logits, B * [{"temperature": 1.0, **NEUTRAL, **change}])


def test_cuts_keep_ties_together():
    logits = np.float32([[2, 1, 1, 1, 0, 0]])
    for change, kept in (
        ({"top_k": 2}, 4),
        ({"top_p": 0.5}, 4),
        ({"top_p": 0.3}, 1),
        ({"min_p": 0.36}, 4),
        ({"min_p": 0.37}, 1),
    ):
        rows = [{"temperature": 1.0, **NEUTRAL, **change}]
        p = evaluate(jnp.asarray(logits), settings_of(rows), jnp.zeros((1, 6)))[0]
        assert (np.asarray(p) > 0).sum() == kept


def test_draws_have_the_law_of_the_row():
    num = 60_000
    base = np.float32([0.3, -1.0, 2.0, 0.3, -3.0, 1.1])
    rows = [
        {"temperature": 0.8, "top_k": 5, "top_p": 0.95, "min_p": 0.03},
        {"temperature": 1.5, **NEUTRAL},
    ]

    @jax.jit
    def draw_all(key):
        keys = jax.random.split(key, num)
        ids = jnp.broadcast_to(jnp.arange(6, dtype=jnp.int32), (num, 6))
        gumbel = noise.token_gumbel(keys, jnp.zeros((num,), jnp.int32), ids)
        logits = jnp.broadcast_to(jnp.asarray(base), (num, 6))
        settings = settings_of(rows)
        settings = jax.tree.map(lambda x: jnp.tile(x, num // 2), settings)
        row = sampling.make_row(logits, settings)
        return sampling.draw(logits, row, settings.temperature, gumbel)

    drawn = np.asarray(draw_all(jax.random.key(2))).reshape(-1, 2)
    for b, row in enumerate(rows):
        p, _ = reference(base, **row)
        counts = np.bincount(drawn[:, b], minlength=6)
        assert counts[p == 0].sum() == 0
        expected = p[p > 0] * len(drawn)
        chi2 = ((counts[p > 0] - expected) ** 2 / expected).sum()
        freedom = len(expected) - 1
        assert (chi2 - freedom) / np.sqrt(2 * freedom) < 5


@pytest.mark.parametrize("temperature", [1e-6, 1e-5, 0.5])
def test_near_ties_of_large_logits_are_drawn_at_their_rate(temperature):
    # Beside 30, T * gumbel would be rounded to multiples of 2e-6.
    count = 100_000
    logits = jnp.broadcast_to(jnp.float32([30.0, 30.0 - 2e-6, 20.0]), (count, 3))
    settings = sampling.check_sampling(Sampling(temperature=temperature), count)
    row = sampling.make_row(logits, settings)
    gumbel = jax.random.gumbel(jax.random.key(0), (count, 3))
    drawn = sampling.draw(logits, row, settings.temperature, gumbel)
    ids = jnp.broadcast_to(jnp.arange(3), (count, 3))
    q = sampling.probability(logits, ids, row, settings.temperature)[0, 0]
    error = np.mean(np.asarray(drawn) == 0) - q
    assert abs(error) < 5 * np.sqrt(q * (1 - q) / count)


@pytest.mark.parametrize("temperature", [0.0, 1e-40])
def test_a_temperature_that_a_device_flushes_to_0_is_0(temperature):
    logits = jnp.float32([[1.0, 1.5, 1.5]])
    settings = sampling.check_sampling(Sampling(temperature=temperature), 1)
    row = sampling.make_row(logits, settings)
    assert row.point.tolist() == [1]
    assert jnp.isfinite(row.log_normaliser).all()
    gumbel = jnp.float32([[80.0, 0.0, 1.0]])
    assert sampling.draw(logits, row, settings.temperature, gumbel).tolist() == [1]


def test_without_a_temperature_everything_is_greedy():
    logits = jnp.asarray(np.random.default_rng(3).normal(size=(B, V)), jnp.float32)
    p, index, log_p, row = evaluate(logits, Sampling(), None)
    best = np.argmax(logits, axis=-1)
    np.testing.assert_array_equal(index, best)
    np.testing.assert_array_equal(p, np.eye(V)[best])
    np.testing.assert_array_equal(log_p, 0)
    np.testing.assert_array_equal(row.point, best)


@pytest.mark.parametrize("shape", [(4,), (40_000, 3), (3, 8, 517), (2, 49_152)])
def test_rows_without_a_distribution_are_found(shape):
    """Also where the compiler vectorises: XLA:CPU's maximum may pass over a NaN."""
    logits = np.random.default_rng(6).normal(size=shape).astype(np.float32)
    has_distribution = jax.jit(sampling.has_distribution)
    assert has_distribution(jnp.asarray(logits)).all()
    for value in (np.nan, np.inf):
        for place in (0, shape[-1] // 2, shape[-1] - 1):
            broken = logits.copy()
            broken[..., place] = value
            assert not has_distribution(jnp.asarray(broken)).any()
    logits[..., 1:] = -np.inf
    assert has_distribution(jnp.asarray(logits)).all()
    logits[..., 0] = -np.inf
    assert not has_distribution(jnp.asarray(logits)).any()


def test_check_sampling_broadcasts():
    settings = Sampling(temperature=0.7, top_k=np.array([3, 4]), top_p=1, min_p=0.1)
    found = sampling.check_sampling(settings, 2)
    np.testing.assert_allclose(found.temperature, [0.7, 0.7])
    np.testing.assert_array_equal(found.top_k, [3, 4])
    assert found.top_k.dtype == jnp.int32
    assert found.top_p.dtype == jnp.float32
    assert sampling.check_sampling(Sampling(), 2) == Sampling()


@pytest.mark.parametrize(
    "name",
    [
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "no_repeat_ngram_size",
        "logit_bias",
        "bad_words",
        "allowed_tokens",
        "grammar",
        "regex",
        "json_schema",
    ],
)
def test_what_sampling_does_not_support_yet(name):
    message = (
        f"`sampling.{name}` is not supported yet: Sampling has temperature, top_k, "
        "top_p and min_p"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        Sampling(temperature=1.0, **{name: 1.1})
    with pytest.raises(TypeError, match="unexpected keyword argument 'temprature'"):
        Sampling(temprature=1.0)


def test_sampling_is_still_a_pytree():
    settings = Sampling(temperature=0.5, top_k=3).replace(top_p=0.9)
    doubled = jax.tree.map(lambda x: 2 * x, settings)
    assert doubled == Sampling(temperature=1.0, top_k=6, top_p=1.8)
