"""The chances of round starts against simulated decoding, and the on-policy step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.training import (
    anchors,
    losses,
    objective,
    settings,
    target_states,
    vocabulary,
)

pytestmark = pytest.mark.usefixtures("quick_compilation")

S, K = 14, 3


def simulate(accept, mask, rng, runs):
    """Counts how often a round begins at each position of one text."""
    counts = np.zeros(S)
    allowed = np.append(mask[:-1] & mask[1:], False)
    firsts = [t for t in range(S) if mask[t] and (t == 0 or not mask[t - 1])]
    for _ in range(runs):
        for first in firsts:
            t = first
            while t < S and allowed[t]:
                counts[t] += 1
                passed = rng.random(K) < accept[t]
                t += int(np.cumprod(passed).sum()) + 1
    return counts / runs


def test_starts_equal_simulated_rounds():
    rng = np.random.default_rng(0)
    mask = np.ones(S, bool)
    mask[[0, 1, 7]] = False  # two answers
    blocks = anchors.make_blocks(
        jnp.zeros((1, S), jnp.int32),
        jnp.asarray(mask[None]),
        anchors.everywhere(jnp.asarray(mask[None])),
        block_size=K,
        mask_token=0,
    )
    accept = np.where(blocks.is_supervised[0], rng.uniform(0.1, 1, (S, K)), 0)
    found = anchors.round_starts(
        jnp.asarray(accept[None], jnp.float32), jnp.asarray(mask[None])
    )[0]
    runs = 20_000
    expected = simulate(accept, mask, rng, runs)
    assert float(found[2]) == 1
    assert float(found[8]) == 1
    np.testing.assert_allclose(found, expected, atol=5 * 0.5 / runs**0.5)


def test_certain_drafts_start_every_k_plus_1():
    mask = jnp.ones((1, S), jnp.bool_)
    found = anchors.round_starts(jnp.ones((1, S, K), jnp.float32), mask)[0]
    np.testing.assert_array_equal(np.flatnonzero(found), np.arange(0, S - 1, K + 1))


def test_on_policy_loss_weighs_blocks_by_their_chance(small):
    """The loss equals the plain loss with the weights put in by hand."""
    target, target_params, drafters, batch = small
    config = settings.TrainConfig()
    recipes = (settings.Recipe(),) * 2
    states = target_states.compute(
        target, target_params, batch, drafters[0].tap_layers, "xla"
    )
    from dspark_jax.training import step

    params = tuple(
        step.init_params(jax.random.key(i), d, target_params.final_norm)
        for i, d in enumerate(drafters)
    )
    head = vocabulary.head_matrix(target, target_params)
    chosen = anchors.everywhere(batch.loss_mask)
    ce = jnp.full(2, 0.1, jnp.float32)

    def embed(ids):
        return target.embed(target_params, ids)

    outcomes = objective.evaluate(
        params,
        batch,
        states,
        chosen,
        embed,
        head,
        ce,
        drafters=drafters,
        recipes=recipes,
        config=config,
        on_policy=True,
    )
    blocks = anchors.make_blocks(
        batch.tokens,
        batch.loss_mask,
        chosen,
        block_size=drafters[0].block_size,
        mask_token=drafters[0].mask_token,
    )
    for p, drafter, outcome in zip(params, drafters, outcomes, strict=True):
        rows, logits = objective.draft_rows(
            p,
            drafter,
            blocks,
            chosen,
            states,
            embed(blocks.inputs),
            recipe=recipes[0],
            config=config,
        )
        terms = vocabulary.reference_terms(
            rows, head, anchors.target_rows(states.hidden, blocks), blocks.labels
        )
        accept = jnp.where(
            blocks.is_supervised, jnp.exp(jnp.minimum(terms.log_ratio, 0)), 0
        )
        starts = anchors.round_starts(accept, batch.loss_mask)
        weights = losses.slot_weights(blocks.is_supervised, 4.0) * starts[..., None]
        bce = losses.confidence_loss(logits, losses.accept_rate(terms.l1))
        slots = 0.1 * terms.ce + 0.9 * terms.l1 + bce
        expected = losses.weighted_mean(slots, weights)
        np.testing.assert_allclose(outcome.loss, expected, rtol=1e-5)
        top, bottom = outcome.metrics["tau_rounds"]
        assert 1 < float(top / bottom) < 1 + drafter.block_size
