"""Exactness by enumeration of drafts over few tokens: candidates, and real drafters.

What a draft says of its own law must be what it was drawn with: else the joint law of
K + 1 tokens is not the target's.
"""

import functools

import enumerated_laws
import enumerated_worlds
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from enumerated_worlds import PATHS, K, V

from dspark_jax.config import BlockConfig, DecoderConfig, DrafterConfig
from dspark_jax.drafters import dspark
from dspark_jax.targets import decoder

pytestmark = pytest.mark.usefixtures("quick_compilation")


def test_draft_support_may_differ_by_slot(monkeypatch):
    """Candidates: ids [B, K, N], q zero outside, in any order."""
    worlds = enumerated_worlds.make_worlds(seed=1, num=96)
    tokens, p_logits, window, cap, settings = enumerated_worlds.rows_of(worlds)
    rng = np.random.default_rng(2)
    num = len(worlds["settings"])
    order = rng.permuted(np.tile(np.arange(V), (num, 1, K, 1)), axis=-1)[..., :3]
    ids = np.broadcast_to(order, (num, PATHS, K, 3)).reshape(-1, K, 3).astype(np.int32)
    q_logits = enumerated_worlds.at_prefixes(worlds["q"]).reshape(-1, K, V)
    q_logits = np.take_along_axis(q_logits, ids, axis=-1)
    q_logits = np.where(np.isfinite(q_logits.max(-1, keepdims=True)), q_logits, 0.0)
    enumerated_laws.force_tokens(monkeypatch)

    @jax.jit
    def run(q_logits, ids, tokens, p_logits, window, cap, settings):
        draft = enumerated_laws.draw_draft(q_logits, ids, tokens, settings)
        return enumerated_laws.evaluate(draft, p_logits, window, cap, settings)

    arrays = (jnp.asarray(q_logits), jnp.asarray(ids), tokens, p_logits, window, cap)
    drawn, probability, found = run(*arrays, settings)
    draws = enumerated_laws.draw_weights(drawn, probability, tokens)
    np.testing.assert_allclose(draws.sum(1), 1, atol=1e-6)
    truth = enumerated_worlds.truth_of(worlds)
    enumerated_laws.check_joint_law(draws, found, worlds, truth)


@functools.cache
def tiny_models(kind):
    block = BlockConfig(width=8, num_heads=2, num_kv_heads=1, head_width=4, ffn_width=8)
    target = decoder.make_target(
        DecoderConfig(vocab_size=V, num_layers=1, block=block, max_position=16)
    )
    config = DrafterConfig(
        vocab_size=V,
        num_layers=1,
        block=block,
        max_position=16,
        block_size=K,
        mask_token=3,
        tap_layers=(0,),
        num_target_layers=1,
        markov_kind=kind,
        markov_rank=0 if kind == "none" else 4,
        confidence_kind="plain",
    )
    return target, config, dspark.make_drafter(config, target)


@pytest.mark.parametrize(
    ("kind", "candidates", "draft_vocabulary"),
    [
        ("none", 3, (0, 1, 3)),
        ("vanilla", 2, None),
        ("gated", None, (0, 2, 3)),
        ("rnn", None, None),
    ],
)
def test_heads_propose_what_they_say(monkeypatch, kind, candidates, draft_vocabulary):
    """Real drafters: q given the drafted path, candidates, draft vocabulary."""
    worlds = enumerated_worlds.make_worlds(seed=3, num=32)
    target, config, drafter = tiny_models(kind)
    tokens, p_logits, window, cap, settings = enumerated_worlds.rows_of(worlds)

    def large(key, shapes):
        return jax.tree.map(
            lambda x, k: 0.7 * jax.random.normal(k, x.shape, x.dtype),
            shapes,
            jax.tree.unflatten(
                jax.tree.structure(shapes),
                list(jax.random.split(key, len(jax.tree.leaves(shapes)))),
            ),
        )

    target_params = large(jax.random.key(1), decoder.abstract(target.config))
    params = large(jax.random.key(2), dspark.abstract(config))
    if draft_vocabulary is not None:
        params = dspark.with_draft_vocabulary(
            params, target, target_params, np.array(draft_vocabulary)
        )
    enumerated_laws.force_tokens(monkeypatch)
    batch = tokens.shape[0]
    num = len(worlds["settings"])

    @jax.jit
    def run(params, target_params, tokens, p_logits, window, cap, settings):
        # One context and anchor per world; all paths of a world share them.
        taps = jax.random.normal(jax.random.key(5), (num, 2, 8), jnp.float32)
        taps = jnp.repeat(taps, PATHS, axis=0)
        anchor = jnp.repeat(jnp.arange(num, dtype=jnp.int32) % V, PATHS)
        at = jnp.broadcast_to(jnp.arange(2, dtype=jnp.int32), (batch, 2))
        state = drafter.init_state(batch, 8)
        state = drafter.observe(params, state, jnp.zeros_like(at), at, taps)
        sampler = enumerated_laws.forced_sampler(tokens, settings, candidates)
        position = jnp.full((batch,), 2, jnp.int32)
        draft, _ = drafter.propose(
            params, target_params, state, anchor, position, sampler
        )
        found = enumerated_laws.evaluate(draft, p_logits, window, cap, settings)
        return draft, found

    draft, (drawn, probability, found) = run(
        params, target_params, tokens, p_logits, window, cap, settings
    )
    draws = enumerated_laws.draw_weights(drawn, probability, tokens)
    np.testing.assert_allclose(draws.sum(1), 1, atol=1e-6)
    if kind != "none":
        # The second slot's logits must depend on the first token.
        logits = np.asarray(draft.logits).reshape(num, V, -1, K, draft.logits.shape[-1])
        assert np.abs(logits[:, 0, 0, 1] - logits[:, 1, 0, 1]).max() > 0.1
    if kind == "rnn":
        # The third slot's depends on the first one too, given the second.
        logits = np.asarray(draft.logits).reshape(num, V, V, V, K, -1)
        assert np.abs(logits[:, 0, 2, 0, 2] - logits[:, 1, 2, 0, 2]).max() > 1e-3
    truth = enumerated_worlds.truth_of(worlds)
    enumerated_laws.check_joint_law(draws, found, worlds, truth)
