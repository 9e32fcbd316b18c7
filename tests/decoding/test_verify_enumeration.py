"""Exactness by enumeration: the joint law of K + 1 tokens, over all drafts.

Every draft of every world is forced, and every outcome has its weight. The same sums
show windows that look ahead, the block rule's prefix weights and its gain.
"""

import enumerated_laws
import enumerated_worlds
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from enumerated_laws import RULES
from enumerated_worlds import PATHS, TOKENS, K, V

from dspark_jax import sampling
from dspark_jax.decoding import verify
from dspark_jax.sampling import Sampling
from dspark_jax.types import Draft

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(scope="module")
def enumerated():
    """All worlds with drafts over the whole vocabulary, evaluated once."""
    worlds = enumerated_worlds.make_worlds(seed=0, num=400)
    tokens, p_logits, window, cap, settings = enumerated_worlds.rows_of(worlds)
    q_logits = enumerated_worlds.at_prefixes(worlds["q"]).reshape(-1, K, V)
    with pytest.MonkeyPatch.context() as monkeypatch:
        enumerated_laws.force_tokens(monkeypatch)

        @jax.jit
        def run(q_logits, tokens, p_logits, window, cap, settings):
            draft = enumerated_laws.draw_draft(q_logits, None, tokens, settings)
            return enumerated_laws.evaluate(draft, p_logits, window, cap, settings)

        arguments = (jnp.asarray(q_logits), tokens, p_logits)
        drawn, probability, found = run(*arguments, window, cap, settings)
        full = jnp.full_like(window, K)
        _, _, found_full = run(*arguments, full, full, settings)
        anticipating = jnp.where(tokens[:, 0] % 2 == 0, K, 0)
        _, _, found_anticipating = run(*arguments, anticipating, full, settings)
    broken = ~np.isfinite(q_logits.max(-1))
    slots = np.where(broken, 1 / V, np.asarray(probability, np.float64))
    # A broken row is drawn uniformly, except at temperature 0: its first token.
    greedy = np.repeat(worlds["settings"][:, 0], PATHS)[:, None] == 0
    slots = np.where(broken & greedy, 1.0, slots)
    is_drawn = (np.asarray(drawn) == np.asarray(tokens)).all(-1)
    return {
        "worlds": worlds,
        "truth": enumerated_worlds.truth_of(worlds),
        "draws": np.where(is_drawn, slots.prod(-1), 0.0).reshape(-1, PATHS),
        "slots": slots,
        "found": found,
        "full": found_full,
        "anticipating": found_anticipating,
    }


@pytest.mark.parametrize("rule", RULES)
def test_joint_law_is_the_targets(enumerated, rule):
    bounds, counts, masses = enumerated["found"][rule]
    law = enumerated_laws.a_law(bounds, counts, enumerated["worlds"]["cap"])
    np.testing.assert_allclose(enumerated["draws"].sum(1), 1, atol=1e-6)
    found = enumerated_laws.joint_law(
        enumerated["draws"], law, masses, enumerated["truth"]
    )
    np.testing.assert_allclose(
        found, enumerated_laws.true_law(enumerated["truth"]), atol=1e-6, rtol=0
    )


@pytest.mark.parametrize("rule", RULES)
def test_anticipating_windows_are_caught(enumerated, rule):
    bounds, counts, masses = enumerated["anticipating"][rule]
    found = enumerated_laws.joint_law(
        enumerated["draws"],
        enumerated_laws.a_law(bounds, counts),
        masses,
        enumerated["truth"],
    )
    error = np.abs(found - enumerated_laws.true_law(enumerated["truth"])).max(1)
    assert np.mean(error > 1e-3) > 0.25
    assert error.max() > 0.1


def test_block_accepts_a_prefix_with_its_weight(enumerated):
    bounds, counts, _ = enumerated["full"]["block"]
    num = len(enumerated["draws"])
    law = enumerated_laws.a_law(bounds, counts).reshape(num, PATHS, K + 1)
    p = enumerated_worlds.at_prefixes(enumerated["truth"])[:, :, :K]  # [S, X, K, V]
    p = np.take_along_axis(p, TOKENS[None, :, :, None], axis=-1)[..., 0]
    q = np.asarray(enumerated["slots"]).reshape(num, PATHS, K)
    # Against the row it is verified with: a broken one is a point mass.
    broken = ~np.isfinite(
        enumerated_worlds.at_prefixes(enumerated["worlds"]["q"]).max(-1)
    )
    q = np.where(broken, 1.0, q)
    weight = np.ones((num, PATHS))
    draws = enumerated["draws"]
    for k in range(1, K + 1):
        ratio = weight * p[..., k - 1]
        weight = np.minimum(1, ratio / np.where(q[..., k - 1] > 0, q[..., k - 1], 1))
        survives = (draws * law[..., k:].sum(-1)).reshape(num, V**k, -1).sum(2)
        expected = (draws * weight).reshape(num, V**k, -1).sum(2)
        np.testing.assert_allclose(survives, expected, atol=1e-6, rtol=0)


def test_block_is_never_shorter_in_expectation(enumerated):
    expected = {}
    for rule in RULES:
        bounds, counts, _ = enumerated["full"][rule]
        law = enumerated_laws.a_law(bounds, counts).reshape(-1, PATHS, K + 1)
        mean = (law * np.arange(K + 1)).sum(-1)
        expected[rule] = (enumerated["draws"] * mean).sum(1)
    gain = expected["block"] - expected["token"]
    assert gain.min() > -1e-6
    assert gain.max() > 0.1


def test_greedy_is_argmax_equality(enumerated):
    worlds = enumerated["worlds"]
    tokens, p_logits, window, cap, _ = enumerated_worlds.rows_of(worlds)
    keys = jax.random.split(jax.random.key(3), tokens.shape[0])
    position = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    draft = Draft(
        tokens=tokens,
        probability=jnp.full(tokens.shape, 0.3, jnp.float32),
        logits=jnp.zeros((*tokens.shape, V), jnp.float32),
        ids=None,
        row=sampling.make_row(jnp.zeros((*tokens.shape, V), jnp.float32), Sampling()),
        confidence_logits=None,
    )

    @jax.jit
    def greedy(draft, p_logits, window, cap):
        row = sampling.make_row(p_logits, Sampling())
        arguments = (keys, position, draft, p_logits, row, window, Sampling())
        return [
            verify.verify(*arguments, rule=rule, commit_length=cap)
            for rule in (*RULES, "seeded")
        ]

    best = np.argmax(np.asarray(p_logits), axis=-1)
    equal = (best[:, :K] == np.asarray(tokens)) & (
        np.arange(K) < np.asarray(window)[:, None]
    )
    accepted = np.minimum(np.cumprod(equal, axis=1).sum(1), np.asarray(cap))
    for verdict in greedy(draft, p_logits, window, cap):
        np.testing.assert_array_equal(verdict.num_accepted, accepted)
        np.testing.assert_array_equal(
            verdict.next_token, best[np.arange(len(best)), accepted]
        )
        assert bool(verdict.is_finite.all())
