"""Exactness by enumeration: the joint law of K + 1 tokens, over all drafts.

Every draft is forced in turn through the library's own sampler; acceptance is
integrated over its uniforms from the library's own bounds, through its own counting;
the next token's law is its own mass. The truth is a float64 numpy reference.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import noise, sampling
from dspark_jax.config import BlockConfig, DecoderConfig, DrafterConfig
from dspark_jax.decoding import verify
from dspark_jax.draft_sampler import DraftSampler
from dspark_jax.drafters import dspark
from dspark_jax.sampling import Sampling
from dspark_jax.targets import decoder
from dspark_jax.types import Draft

pytestmark = pytest.mark.usefixtures("quick_compilation")

V, K = 4, 3
PATHS = V**K
PATTERNS = np.array(list(itertools.product([False, True], repeat=K)))  # [2^K, K]
TOKENS = np.array(list(itertools.product(range(V), repeat=K)), np.int32)  # [X, K]
RULES = ("token", "block")
SETTINGS = (  # temperature, top_k, top_p, min_p
    (1.0, V, 1.0, 0.0),
    (0.7, V, 1.0, 0.0),
    (2.5, V, 1.0, 0.0),
    (0.0, V, 1.0, 0.0),
    (1.0, 2, 1.0, 0.0),
    (1.0, V, 0.7, 0.0),
    (1.0, V, 1.0, 0.3),
    (1.3, 3, 0.9, 0.1),
)


def at_prefixes(tables):
    """Tables of levels k, each [S, V^k, ...], read along every path: [S, X, k, ...]."""
    columns = [
        table[:, np.arange(PATHS) // V ** (K - level)]
        for level, table in enumerate(tables)
    ]
    return np.stack(columns, axis=2)


def reference_probs(logits, settings):
    """Hugging Face's order with a sort, in float64: logits [..., V], one setting."""
    temperature, top_k, top_p, min_p = settings
    if temperature == 0:
        return np.eye(V)[np.argmax(logits, axis=-1)]

    def softmax(x):
        with np.errstate(over="ignore"):
            e = np.exp(x - x.max(axis=-1, keepdims=True))
        return e / e.sum(axis=-1, keepdims=True)

    x = logits.astype(np.float64) / temperature
    kth = np.sort(x, axis=-1)[..., -min(int(top_k), V), None]
    x = np.where(x < kth, -np.inf, x)
    p = softmax(x)
    above = (p[..., None, :] * (p[..., None, :] > p[..., None])).sum(-1)
    x = np.where((above < top_p) | (top_p == 1), x, -np.inf)
    p = softmax(x)
    return softmax(np.where(p >= min_p * p.max(-1, keepdims=True), x, -np.inf))


def random_logits(rng, kind, shape):
    logits = rng.normal(size=shape) * rng.choice([0.5, 2.0])
    if kind == "zeros":
        hole = rng.random(shape) < 0.4
        hole[np.arange(len(hole)), rng.integers(V, size=len(hole))] = False
        logits = np.where(hole, -np.inf, logits)
    if kind == "points":
        points = rng.random(len(logits)) < 0.5
        only = np.eye(V, dtype=bool)[rng.integers(V, size=len(logits))]
        logits = np.where(points[:, None] & ~only, -np.inf, logits)
    return logits.astype(np.float32)


def predictable(rng):
    """A length in 0..K along every path whose {length > k} depends on x_1..x_k only."""
    keeps = [rng.random((1, V**level)) < 0.7 for level in range(K)]
    return np.cumprod(at_prefixes(keeps)[0], axis=1).sum(axis=1)


def make_worlds(seed, num):
    """Random target and draft tables, settings, windows and caps, flattened to rows."""
    rng = np.random.default_rng(seed)
    p_tables = [[] for _ in range(K + 1)]
    q_tables = [[] for _ in range(K)]
    setting, window, cap = [], [], []
    for index in range(num):
        kinds = ("plain", "zeros", "points")
        p_kind, q_kind = rng.choice(kinds), rng.choice([*kinds, "equal", "broken"])
        for level in range(K + 1):
            p = random_logits(rng, p_kind, (V**level, V))
            p_tables[level].append(p)
            if level == K:
                continue
            q = p if q_kind == "equal" else random_logits(rng, q_kind, p.shape)
            if q_kind == "broken":
                bad = rng.choice([np.nan, np.inf, -np.inf], size=p.shape)
                q = np.where(rng.random((len(p), 1)) < 0.5, bad, q).astype(np.float32)
            q_tables[level].append(q)
        setting.append(SETTINGS[index % len(SETTINGS)])
        choices = [np.full(PATHS, fixed) for fixed in range(K + 1)]
        choices += 4 * [predictable(rng)] + 4 * [np.full(PATHS, K)]
        window.append(choices[rng.integers(len(choices))])
        choices = [*choices[: K + 1], predictable(rng), *(6 * [np.full(PATHS, K)])]
        cap.append(choices[rng.integers(len(choices))])
    return {
        "p": [np.stack(level) for level in p_tables],
        "q": [np.stack(level) for level in q_tables],
        "settings": np.array(setting),
        "window": np.stack(window).astype(np.int32),
        "cap": np.stack(cap).astype(np.int32),
    }


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


def true_law(truth):
    law = truth[0][:, 0]
    for level in range(1, K + 1):
        law = (law[:, :, None] * truth[level]).reshape(len(law), -1)
    return law


def truth_of(worlds):
    return [
        np.stack(
            [
                reference_probs(table, settings)
                for table, settings in zip(level, worlds["settings"], strict=True)
            ]
        )
        for level in worlds["p"]
    ]


def rows_of(worlds):
    """The arrays of one row per (world, path), and the settings [R]."""
    num = len(worlds["settings"])
    tokens = np.tile(TOKENS, (num, 1))
    temperature, top_k, top_p, min_p = np.repeat(worlds["settings"], PATHS, axis=0).T
    settings = Sampling(
        temperature=jnp.asarray(temperature, jnp.float32),
        top_k=jnp.asarray(top_k, jnp.int32),
        top_p=jnp.asarray(top_p, jnp.float32),
        min_p=jnp.asarray(min_p, jnp.float32),
    )
    p_logits = at_prefixes(worlds["p"]).reshape(-1, K + 1, V)
    window, cap = worlds["window"].reshape(-1), worlds["cap"].reshape(-1)
    return (
        jnp.asarray(tokens),
        jnp.asarray(p_logits),
        jnp.asarray(window),
        jnp.asarray(cap),
        settings,
    )


def draw_weights(tokens, probability, forced, broken=None):
    """Probability that each draft is drawn, [S, X]; uniform where a row is broken."""
    slots = np.asarray(probability, np.float64)
    if broken is not None:
        slots = np.where(broken, np.asarray(broken) / slots.shape[1], slots)
    is_drawn = (np.asarray(tokens) == np.asarray(forced)).all(-1)
    return np.where(is_drawn, slots.prod(-1), 0.0).reshape(-1, PATHS)


@pytest.fixture(scope="module")
def enumerated():
    """All worlds with drafts over the whole vocabulary, evaluated once."""
    worlds = make_worlds(seed=0, num=400)
    tokens, p_logits, window, cap, settings = rows_of(worlds)
    q_logits = at_prefixes(worlds["q"]).reshape(-1, K, V)
    with pytest.MonkeyPatch.context() as monkeypatch:
        force_tokens(monkeypatch)

        @jax.jit
        def run(q_logits, tokens, p_logits, window, cap, settings):
            draft = draw_draft(q_logits, None, tokens, settings)
            return evaluate(draft, p_logits, window, cap, settings)

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
        "truth": truth_of(worlds),
        "draws": np.where(is_drawn, slots.prod(-1), 0.0).reshape(-1, PATHS),
        "slots": slots,
        "found": found,
        "full": found_full,
        "anticipating": found_anticipating,
    }


@pytest.mark.parametrize("rule", RULES)
def test_joint_law_is_the_targets(enumerated, rule):
    bounds, counts, masses = enumerated["found"][rule]
    law = a_law(bounds, counts, enumerated["worlds"]["cap"])
    np.testing.assert_allclose(enumerated["draws"].sum(1), 1, atol=1e-6)
    found = joint_law(enumerated["draws"], law, masses, enumerated["truth"])
    np.testing.assert_allclose(found, true_law(enumerated["truth"]), atol=1e-6, rtol=0)


@pytest.mark.parametrize("rule", RULES)
def test_anticipating_windows_are_caught(enumerated, rule):
    bounds, counts, masses = enumerated["anticipating"][rule]
    found = joint_law(
        enumerated["draws"], a_law(bounds, counts), masses, enumerated["truth"]
    )
    error = np.abs(found - true_law(enumerated["truth"])).max(1)
    assert np.mean(error > 1e-3) > 0.25
    assert error.max() > 0.1


def test_block_accepts_a_prefix_with_its_weight(enumerated):
    bounds, counts, _ = enumerated["full"]["block"]
    num = len(enumerated["draws"])
    law = a_law(bounds, counts).reshape(num, PATHS, K + 1)
    p = at_prefixes(enumerated["truth"])[:, :, :K]  # [S, X, K, V]
    p = np.take_along_axis(p, TOKENS[None, :, :, None], axis=-1)[..., 0]
    q = np.asarray(enumerated["slots"]).reshape(num, PATHS, K)
    # Against the row it is verified with: a broken one is a point mass.
    broken = ~np.isfinite(at_prefixes(enumerated["worlds"]["q"]).max(-1))
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
        law = a_law(bounds, counts).reshape(-1, PATHS, K + 1)
        mean = (law * np.arange(K + 1)).sum(-1)
        expected[rule] = (enumerated["draws"] * mean).sum(1)
    gain = expected["block"] - expected["token"]
    assert gain.min() > -1e-6
    assert gain.max() > 0.1


def test_greedy_is_argmax_equality(enumerated):
    worlds = enumerated["worlds"]
    tokens, p_logits, window, cap, _ = rows_of(worlds)
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


def test_draft_support_may_differ_by_slot(monkeypatch):
    """Candidates: ids [B, K, N], q zero outside, in any order."""
    worlds = make_worlds(seed=1, num=96)
    tokens, p_logits, window, cap, settings = rows_of(worlds)
    rng = np.random.default_rng(2)
    num = len(worlds["settings"])
    order = rng.permuted(np.tile(np.arange(V), (num, 1, K, 1)), axis=-1)[..., :3]
    ids = np.broadcast_to(order, (num, PATHS, K, 3)).reshape(-1, K, 3).astype(np.int32)
    q_logits = at_prefixes(worlds["q"]).reshape(-1, K, V)
    q_logits = np.take_along_axis(q_logits, ids, axis=-1)
    q_logits = np.where(np.isfinite(q_logits.max(-1, keepdims=True)), q_logits, 0.0)
    force_tokens(monkeypatch)

    @jax.jit
    def run(q_logits, ids, tokens, p_logits, window, cap, settings):
        draft = draw_draft(q_logits, ids, tokens, settings)
        return evaluate(draft, p_logits, window, cap, settings)

    arrays = (jnp.asarray(q_logits), jnp.asarray(ids), tokens, p_logits, window, cap)
    drawn, probability, found = run(*arrays, settings)
    draws = draw_weights(drawn, probability, tokens)
    np.testing.assert_allclose(draws.sum(1), 1, atol=1e-6)
    truth = truth_of(worlds)
    for rule in RULES:
        bounds, counts, masses = found[rule]
        law = a_law(bounds, counts, worlds["cap"])
        joint = joint_law(draws, law, masses, truth)
        np.testing.assert_allclose(joint, true_law(truth), atol=1e-6, rtol=0)


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
    worlds = make_worlds(seed=3, num=32)
    target, config, drafter = tiny_models(kind)
    tokens, p_logits, window, cap, settings = rows_of(worlds)

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
    force_tokens(monkeypatch)
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
        sampler = forced_sampler(tokens, settings, candidates)
        position = jnp.full((batch,), 2, jnp.int32)
        draft, _ = drafter.propose(
            params, target_params, state, anchor, position, sampler
        )
        found = evaluate(draft, p_logits, window, cap, settings)
        return draft, found

    draft, (drawn, probability, found) = run(
        params, target_params, tokens, p_logits, window, cap, settings
    )
    draws = draw_weights(drawn, probability, tokens)
    np.testing.assert_allclose(draws.sum(1), 1, atol=1e-6)
    if kind != "none":
        # The second slot's logits must depend on the first token.
        logits = np.asarray(draft.logits).reshape(num, V, -1, K, draft.logits.shape[-1])
        assert np.abs(logits[:, 0, 0, 1] - logits[:, 1, 0, 1]).max() > 0.1
    if kind == "rnn":
        # The third slot's depends on the first one too, given the second.
        logits = np.asarray(draft.logits).reshape(num, V, V, V, K, -1)
        assert np.abs(logits[:, 0, 2, 0, 2] - logits[:, 1, 2, 0, 2]).max() > 1e-3
    truth = truth_of(worlds)
    for rule in RULES:
        bounds, counts, masses = found[rule]
        law = a_law(bounds, counts, worlds["cap"])
        joint = joint_law(draws, law, masses, truth)
        np.testing.assert_allclose(joint, true_law(truth), atol=1e-6, rtol=0)
