"""The DSpark drafter's economies: what they leave out; they change no number."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import draft_sampler, testing
from dspark_jax.drafters import dspark
from dspark_jax.sampling import Sampling

pytestmark = pytest.mark.usefixtures("quick_compilation")

B, K, V = 3, 3, 19
KEPT = np.array([17, 2, 11, 5, 3, 14, 8])


@pytest.fixture(scope="module", params=["vanilla", "gated", "rnn"])
def models(request):
    fields = {"markov_kind": request.param}
    return testing.make_tiny_models(block_size=K, drafter_fields=fields)


def propose(models, *, candidates=None, kept=None):
    """A greedy draft from a random context."""
    params = models.drafter_params
    if kept is not None:
        params = dspark.with_draft_vocabulary(
            params, models.target, models.target_params, kept
        )
    anchor = jnp.asarray([3, 9, 4], jnp.int32)
    position = jnp.asarray([4, 2, 0], jnp.int32)
    random = np.random.default_rng(0)
    state = jax.tree.map(
        lambda x: jnp.asarray(random.normal(size=x.shape), x.dtype),
        models.drafter.init_state(B, 8),
    )

    @jax.jit
    def run(params, target_params, state):
        sampler = draft_sampler.make_draft_sampler(
            jax.random.split(jax.random.key(0), B),
            position,
            Sampling(),
            draft_length=K,
            rule="token",
            candidates=candidates,
        )
        return models.drafter.propose(
            params, target_params, state, anchor, position, sampler
        )[0]

    return run(params, models.target_params, state)


def test_candidates_are_the_best_base_logits_with_the_full_draft_logits(models):
    whole, some = propose(models), propose(models, candidates=6)
    # The winners are among the candidates here, so that both draft the same words.
    np.testing.assert_array_equal(some.tokens, whole.tokens)
    assert some.ids.shape == (B, K, 6)
    assert all(len(set(ids)) == 6 for ids in np.asarray(some.ids).reshape(-1, 6))
    np.testing.assert_allclose(
        some.logits, np.take_along_axis(whole.logits, some.ids, axis=-1), atol=1e-5
    )


def test_a_draft_vocabulary_has_the_logits_of_its_ids(models):
    every = propose(models, kept=np.arange(V))
    np.testing.assert_allclose(every.logits, propose(models).logits, atol=1e-5)
    few = propose(models, kept=KEPT)
    np.testing.assert_array_equal(few.ids, np.sort(KEPT))
    first = np.asarray(every.logits)[:, 0][:, np.sort(KEPT)]
    np.testing.assert_allclose(few.logits[:, 0], first, atol=1e-5)
    assert np.isin(few.tokens, KEPT).all()


def test_candidates_of_a_draft_vocabulary_are_its_ids(models):
    few = propose(models, kept=KEPT)
    some = propose(models, kept=KEPT, candidates=4)
    assert np.isin(some.ids, KEPT).all()
    columns = np.searchsorted(np.sort(KEPT), some.ids)
    np.testing.assert_allclose(
        some.logits[:, 0],
        np.take_along_axis(few.logits, columns, axis=-1)[:, 0],
        atol=1e-5,
    )
    best = np.argmax(some.logits, axis=-1)[..., None]
    np.testing.assert_array_equal(
        some.tokens, np.take_along_axis(some.ids, best, axis=-1)[..., 0]
    )


@pytest.mark.parametrize("has_head", [False, True])
def test_rows_are_those_of_a_head_at_hand(models, has_head):
    """The target's head as a table, or the drafter's own, without computing it."""
    table = jnp.asarray(np.random.default_rng(1).normal(size=(V, 8)), jnp.float32)
    params = models.drafter_params
    arguments = {"head": table}
    if has_head:
        params, arguments = params.replace(head=table), {}
    made = dspark.with_draft_vocabulary(
        params, models.target, models.target_params, KEPT, **arguments
    )
    np.testing.assert_array_equal(made.draft_vocabulary.head, table[np.sort(KEPT)])
    np.testing.assert_array_equal(
        made.draft_vocabulary.w2, params.markov.w2[np.sort(KEPT)]
    )
