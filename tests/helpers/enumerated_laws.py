"""The law of what is committed, where every draft of a world is forced in turn.

Drafts go through the library's own sampler; acceptance is integrated over its uniforms
from the library's own bounds, through its own counting; the next token's law is its own
mass.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from enumerated_worlds import PATHS, K, V

from dspark_jax import noise, sampling
from dspark_jax.decoding import verify
from dspark_jax.draft_sampler import DraftSampler
from dspark_jax.types import Draft

PATTERNS = np.array(list(itertools.product([False, True], repeat=K)))  # [2^K, K]
RULES = ("token", "block")


def force_tokens(monkeypatch):
    """Makes the sampler draw the tokens in its streams, if their q is not zero."""

    def round_gumbel(streams, slot, ids):
        return jnp.where(ids == streams[0][:, slot, None], jnp.float32(1e6), 0.0)

    monkeypatch.setattr(noise, "round_gumbel", round_gumbel)


def forced_sampler(tokens, settings, candidates=None):
    batch = tokens.shape[0]
    return DraftSampler(
        key=jax.random.split(jax.random.key(0), batch),
        anchor_position=jnp.zeros((batch,), jnp.int32),
        sampling=settings,
        streams=(tokens, tokens),
        draft_length=K,
        rule="token",
        candidates=candidates,
    )


def draw_draft(q_logits, ids, tokens, settings):
    sampler = forced_sampler(tokens, settings)
    slots = [
        sampler.draw(slot, q_logits[:, slot], None if ids is None else ids[:, slot])
        for slot in range(K)
    ]
    drawn, probability, row = zip(*slots, strict=True)
    return Draft(
        tokens=jnp.stack(drawn, axis=1),
        probability=jnp.stack(probability, axis=1),
        logits=q_logits,
        ids=ids,
        row=jax.tree.map(lambda *x: jnp.stack(x, axis=1), *row),
        confidence_logits=None,
    )


def evaluate(draft, p_logits, window, cap, settings):
    """Bounds, counts of every pattern and masses of every count, for both rules."""
    wide = jax.tree.map(lambda x: x[:, None], settings)
    row = sampling.make_row(p_logits, wide)
    found = {}
    for rule in RULES:
        bounds = verify.make_bounds(draft, p_logits, row, window, settings, rule=rule)
        counts = [
            verify.count_accepted(
                jnp.broadcast_to(jnp.asarray(pattern), draft.tokens.shape),
                window,
                rule=rule,
            )
            for pattern in PATTERNS
        ]
        masses = [
            verify.next_token_mass(
                draft,
                p_logits,
                row,
                bounds,
                jnp.full(window.shape, count, jnp.int32),
                jnp.minimum(window, cap),
                settings,
            )
            for count in range(K + 1)
        ]
        found[rule] = (bounds, jnp.stack(counts, -1), jnp.stack(masses, 1))
    return draft.tokens, draft.probability, found


def draw_weights(tokens, probability, forced, broken=None):
    """Probability that each draft is drawn, [S, X]; uniform where a row is broken."""
    slots = np.asarray(probability, np.float64)
    if broken is not None:
        slots = np.where(broken, np.asarray(broken) / slots.shape[1], slots)
    is_drawn = (np.asarray(tokens) == np.asarray(forced)).all(-1)
    return np.where(is_drawn, slots.prod(-1), 0.0).reshape(-1, PATHS)


def a_law(bounds, counts, cap=None):
    """P(num_accepted = a) of every row, [R, K + 1], and its expectation."""
    numerator = np.asarray(bounds.numerator, np.float64)
    denominator = np.asarray(bounds.denominator, np.float64)
    ratio = numerator / np.where(denominator > 0, denominator, 1.0)
    passes = np.where(denominator > 0, np.clip(ratio, 0, 1), numerator > 0)
    each = np.where(PATTERNS, passes[:, None], 1 - passes[:, None])  # [R, 2^K, K]
    weight = each.prod(-1)
    counts = np.asarray(counts)
    if cap is not None:
        counts = np.minimum(counts, cap.reshape(-1, 1))
    return np.stack([(weight * (counts == a)).sum(-1) for a in range(K + 1)], -1)


def joint_law(draws, law, masses, truth):
    """The law of K + 1 tokens: committed drafts, the next token, then the target's."""
    num = len(truth[0])
    total = np.zeros((num, V ** (K + 1)))
    masses = np.asarray(masses, np.float64).reshape(num, PATHS, K + 1, V)
    law = law.reshape(num, PATHS, K + 1)
    for a in range(K + 1):
        mass = masses[:, :, a]
        weight = (draws * law[:, :, a])[..., None]
        scale = np.where(weight > 0, mass.sum(-1, keepdims=True), 1.0)
        ends = weight * mass / scale
        ends = ends.reshape(num, V**a, -1, V).sum(2).reshape(num, V ** (a + 1))
        for level in range(a + 1, K + 1):
            ends = (ends[:, :, None] * truth[level]).reshape(num, -1)
        total += ends
    return total


def check_joint_law(draws, found, worlds, truth):
    """Every rule's joint law of K + 1 tokens, from `evaluate`, is the target's."""
    for rule in RULES:
        bounds, counts, masses = found[rule]
        joint = joint_law(draws, a_law(bounds, counts, worlds["cap"]), masses, truth)
        np.testing.assert_allclose(joint, true_law(truth), atol=1e-6, rtol=0)


def true_law(truth):
    law = truth[0][:, 0]
    for level in range(1, K + 1):
        law = (law[:, :, None] * truth[level]).reshape(len(law), -1)
    return law
