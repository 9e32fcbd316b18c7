"""`verify` as a whole: its uniforms, and what happens at a cap on the commit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import sampling
from dspark_jax.decoding import verify
from dspark_jax.sampling import Sampling
from dspark_jax.types import Draft, Row

RUNS, K = 20_000, 2


def test_a_uniform_of_zero_passes_nothing_without_mass():
    """Strictly below: p(x) = 0 never stands, and 0 / 0 is no."""
    bounds = verify.Bounds(
        numerator=jnp.asarray([[0.0, 0.0, 0.5, 1e-30]]),
        denominator=jnp.asarray([[1.0, 0.0, 0.5, 1.0]]),
        weight=jnp.ones((1, 4)),
    )
    np.testing.assert_array_equal(
        bounds.passes(jnp.zeros((1, 4))), [[False, False, True, True]]
    )
    np.testing.assert_array_equal(
        bounds.passes(jnp.full((1, 4), 1 - 2.0**-24)), [[False, False, True, False]]
    )


@pytest.mark.parametrize("rule", ["token", "block"])
def test_after_a_cap_the_next_token_is_the_targets(rule):
    """Two drafts stand, one may be committed: the next is drawn from p, no residual."""
    p = np.array([0.8, 0.15, 0.05], np.float32)
    logits = jnp.broadcast_to(jnp.log(jnp.asarray(p)), (RUNS, K + 1, 3))
    settings = Sampling(temperature=jnp.ones((RUNS,)))
    tokens = jnp.zeros((RUNS, K), jnp.int32)
    flat = jnp.zeros((RUNS, K))
    draft = Draft(
        tokens=tokens,
        probability=jnp.full((RUNS, K), 1 / 3),
        logits=jnp.zeros((RUNS, K, 3)),
        ids=None,
        row=Row(
            top=flat,
            cut=jnp.full((RUNS, K), -jnp.inf),
            log_normaliser=jnp.full((RUNS, K), np.log(3)),
            point=jnp.full((RUNS, K), -1, jnp.int32),
        ),
        confidence_logits=None,
    )

    @functools.partial(jax.jit, static_argnames="rule")
    def run(commit_length, *, rule):
        wide = jax.tree.map(lambda x: x[:, None], settings)
        return verify.verify(
            jax.random.split(jax.random.key(4), RUNS),
            jnp.zeros((RUNS,), jnp.int32),
            draft,
            logits,
            sampling.make_row(logits, wide),
            jnp.full((RUNS,), K, jnp.int32),
            settings,
            rule=rule,
            commit_length=commit_length,
        )

    free = run(jnp.full((RUNS,), K, jnp.int32), rule=rule)
    np.testing.assert_array_equal(free.num_accepted, K)
    capped = run(jnp.full((RUNS,), 1, jnp.int32), rule=rule)
    np.testing.assert_array_equal(capped.num_accepted, 1)
    assert capped.is_finite.all()
    share = np.bincount(capped.next_token, minlength=3) / RUNS
    assert np.all(np.abs(share - p) < 5 * np.sqrt(p * (1 - p) / RUNS))
