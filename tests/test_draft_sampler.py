"""The draft's sampler: valid tokens and their q, also from rows that are not finite."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax import draft_sampler, sampling
from dspark_jax.sampling import Sampling

B, V = 6, 12
NEUTRAL = Sampling(temperature=1.0, top_k=V, top_p=1.0, min_p=0.0)


def test_draft_rows_that_are_not_finite_become_point_masses():
    logits = np.random.default_rng(4).normal(size=(B, V)).astype(np.float32)
    logits[0, 3] = np.nan
    logits[1, 3] = np.inf
    logits[2] = -np.inf
    ids = jnp.arange(V, dtype=jnp.int32)[::-1] + 5

    @functools.partial(jax.jit, static_argnums=0)
    def draw(rule, logits):
        sampler = draft_sampler.make_draft_sampler(
            jax.random.split(jax.random.key(0), B),
            jnp.arange(B, dtype=jnp.int32),
            sampling.check_sampling(NEUTRAL, B),
            draft_length=2,
            rule=rule,
        )
        token, q, row = sampler.draw(1, logits, ids)
        wide = jnp.broadcast_to(ids, logits.shape)
        temperature = sampler.sampling.temperature
        return token, q, sampling.probability(logits, wide, row, temperature)

    for rule in ("token", "seeded"):
        token, q, p = map(np.asarray, draw(rule, jnp.asarray(logits)))
        assert ((token >= 5) & (token < 5 + V)).all()
        np.testing.assert_array_equal(q[:3], 1)
        np.testing.assert_array_equal(p[:3], np.asarray(ids)[None] == token[:3, None])
        np.testing.assert_allclose(p[3:].sum(1), 1, atol=1e-6)
        np.testing.assert_allclose(
            q, p[np.asarray(ids)[None] == token[:, None]], rtol=1e-6
        )


def test_a_greedy_row_that_is_not_finite_is_its_first_token():
    sampler = draft_sampler.make_draft_sampler(
        jax.random.split(jax.random.key(0), 2),
        jnp.arange(2, dtype=jnp.int32),
        Sampling(),
        draft_length=2,
        rule="token",
    )
    logits = jnp.asarray([[0.0, jnp.nan, 1.0], [0.0, 1.0, 3.0]])
    token, q, row = sampler.draw(0, logits, jnp.asarray([7, 8, 9], jnp.int32))
    assert token.tolist() == row.point.tolist() == [7, 9]
    assert q.tolist() == [1, 1]
