"""The law of five tokens over many rounds, with the real noise and the real loop.

Draws that are independent within a round may still be tied across rounds: enumeration
cannot see it, this can. Each test has controls that must fail it.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import table_models

import dspark_jax
from dspark_jax import noise, sampling
from dspark_jax.config import Speculation
from dspark_jax.sampling import Sampling

V, K, NUM = 3, 4, 5  # vocabulary, draft length, tokens of the law
CHUNK = 125_000
RULES = ("token", "block", "seeded")
PLAIN, THRESHOLD, OLD_BUDGET = "full", "threshold", "old_budget"
TARGET = table_models.make_target(V)
DRAFTER = table_models.make_drafter(V, K)
PROMPT = (1, 2)


def target_table(seed=0):
    rng = np.random.default_rng(seed)
    return jnp.asarray(0.8 * rng.normal(size=(V, V, V)), jnp.float32)


def drafter_tables(seed=3):
    """A drafter far from its target, whose confidence says much about x_{k-1}.

    What it likes hardly depends on the context: noise that came twice would draw the
    same token twice.
    """
    rng = np.random.default_rng(seed)
    liked = 1.2 * rng.normal(size=V)
    logits = liked + 0.3 * rng.normal(size=(K, V, V, V))
    return table_models.DrafterTables(
        logits=jnp.asarray(logits, jnp.float32),
        confidence_logits=jnp.asarray([[3.0, -3.0, -3.0]] * K, jnp.float32),
        look_ahead=jnp.int32(0),
    )


@functools.cache
def rounds_program(rule, name=""):
    """NUM tokens of every request: [B] keys -> words [B]. `name` keys the cache."""
    options = Speculation(rule=rule)

    @jax.jit
    def run(keys, target_params, drafter_params, threshold, uses_old_budget):
        models = {
            "target": TARGET,
            "target_params": target_params,
            "drafter": DRAFTER,
            "drafter_params": drafter_params,
            "sampling": Sampling(temperature=1.0),
            "options": options,
        }
        batch = keys.shape[0]
        tokens = jnp.broadcast_to(jnp.asarray(PROMPT, jnp.int32), (batch, 2))
        state = dspark_jax.prefill(
            keys,
            tokens,
            jnp.full((batch,), 2, jnp.int32),
            capacity=2 + NUM + K + 1,
            max_new_tokens=NUM + K + 1,
            **models,
        )
        whole = jnp.full((batch,), K, jnp.int32)

        def step(_, carry):
            state, older, old = carry
            budget = jnp.where(uses_old_budget, older, whole)
            state, info = dspark_jax.speculative_round(
                state,
                confidence_threshold=threshold,
                max_verify_length=budget,
                **models,
            )
            # What a host would plan from this round, used two rounds later.
            return state, old, jnp.where(info.confidence[:, K - 1] > 0.5, K, 0)

        state, _, _ = jax.lax.fori_loop(0, NUM - 1, step, (state, whole, whole))
        words = state.tokens[:, 2 : 2 + NUM]
        return words @ jnp.asarray(V ** np.arange(NUM)[::-1], jnp.int32)

    return run


def sigma(
    rule,
    window,
    *,
    chunks=8,
    program="",
    target_params=None,
    drafter_params=None,
    look_ahead=0,
):
    """χ² of the words against the target's law, in standard deviations."""
    target_params = target_table() if target_params is None else target_params
    drafter_params = drafter_tables() if drafter_params is None else drafter_params
    drafter_params = drafter_params.replace(look_ahead=jnp.int32(look_ahead))
    run = rounds_program(rule, program)
    counts = np.zeros(V**NUM)
    for chunk in range(chunks):
        keys = jax.random.split(jax.random.key(chunk), CHUNK)
        words = run(
            keys,
            target_params,
            drafter_params,
            jnp.float32(0.5 if window == THRESHOLD else 0.0),
            jnp.bool_(window == OLD_BUDGET),
        )
        counts += np.bincount(np.asarray(words), minlength=V**NUM)
    expected = law(np.asarray(target_params, np.float64)) * counts.sum()
    assert expected.min() > 5
    chi2 = np.sum((counts - expected) ** 2 / expected)
    freedom = V**NUM - 1
    return (chi2 - freedom) / np.sqrt(2 * freedom)


def law(table):
    """The target's law of NUM tokens after the prompt, [V^NUM]."""
    p = np.exp(table) / np.exp(table).sum(-1, keepdims=True)
    words = np.array(list(np.ndindex(*[V] * NUM)))
    text = np.concatenate([np.tile(PROMPT, (len(words), 1)), words], axis=1)
    steps = [p[text[:, i], text[:, i + 1], text[:, i + 2]] for i in range(NUM)]
    return np.prod(steps, axis=0)


@pytest.mark.parametrize("window", [PLAIN, THRESHOLD, OLD_BUDGET])
@pytest.mark.parametrize("rule", RULES)
def test_five_tokens_have_the_targets_law(rule, window):
    found = sigma(rule, window)
    assert abs(found) < 5


@pytest.mark.parametrize("rule", ["token", "block"])
def test_an_anticipating_window_fails(rule):
    found = sigma(rule, THRESHOLD, chunks=2, look_ahead=1)
    assert found > 100


def test_an_anticipating_window_is_safe_under_seeded():
    found = sigma("seeded", THRESHOLD, chunks=2, look_ahead=1)
    assert abs(found) < 5


@pytest.mark.parametrize(("rule", "window"), [("block", PLAIN), ("token", OLD_BUDGET)])
def test_noise_keyed_by_position_fails(monkeypatch, rule, window):
    """Slot k's noise keyed by its token's position: a rejected one comes again."""

    def round_streams(key, anchor_position, num_slots, purpose):
        slots = jnp.arange(1, num_slots + 1, dtype=jnp.int32)[None]
        position = anchor_position[:, None] + slots
        return noise._streams(key, position, jnp.uint32(purpose))

    monkeypatch.setattr(noise, "round_streams", round_streams)
    found = sigma(rule, window, chunks=4, program="keyed by position")
    assert found > 50


@pytest.mark.parametrize("rule", RULES)
def test_broken_drafters_change_nothing_but_speed(rule):
    tables = np.array(drafter_tables().logits)
    rng = np.random.default_rng(2)
    kind = rng.integers(5, size=(K, V, V))
    tables[kind == 0] = np.nan
    tables[kind == 1, 1] = np.inf
    tables[kind == 2, :2] = -np.inf  # a point mass on the last token
    tables[kind == 3] = -np.inf
    params = drafter_tables().replace(
        logits=jnp.asarray(tables),
        confidence_logits=jnp.asarray([[3.0, np.nan, np.inf]] * K, jnp.float32),
    )
    for window in (PLAIN, THRESHOLD, OLD_BUDGET):
        assert abs(sigma(rule, window, chunks=2, drafter_params=params)) < 5


def test_a_request_twice_in_one_batch_gives_the_same_words():
    keys = jax.random.split(jax.random.key(5), CHUNK)
    keys = keys.at[CHUNK // 2 :].set(keys[: CHUNK - CHUNK // 2])
    for rule in RULES:
        words = rounds_program(rule)(
            keys,
            target_table(),
            drafter_tables(),
            jnp.float32(0.5),
            jnp.bool_(True),
        )
        first, second = np.split(np.asarray(words), 2)
        np.testing.assert_array_equal(first, second)


def test_a_tail_of_tiny_masses_is_drawn_at_its_rate():
    """110,000 tokens of 9e-8 each: mass 0.01. float32 noise of 24 bits draws half."""
    size, mass, draws, rows = 110_000, 0.01, 12_000, 40
    logits = np.full((rows, size + 1), np.log(mass / size), np.float32)
    logits[:, 0] = np.log(1 - mass)
    settings = Sampling(temperature=jnp.ones((rows,), jnp.float32))
    keys = jnp.broadcast_to(jax.random.key(11), (rows,))
    # Arguments and three programs: XLA would fold constants of this size for half a
    # minute, and draw the noise of a fused argmax more than once.
    row = jax.jit(sampling.make_row)(logits, settings)
    make_noise, draw = jax.jit(noise.token_gumbel), jax.jit(sampling.draw)
    ids = np.broadcast_to(np.arange(size + 1, dtype=np.int32), logits.shape)
    ids, logits = jnp.asarray(ids), jnp.asarray(logits)
    drawn = []
    for start in range(0, draws, rows):
        position = start + jnp.arange(rows, dtype=jnp.int32)
        gumbel = make_noise(keys, position, ids)
        drawn.append(draw(logits, row, settings.temperature, gumbel))
    count = int((np.stack(drawn) > 0).sum())
    deviation = np.sqrt(draws * mass * (1 - mass))
    assert abs(count - draws * mass) < 2.5 * deviation


@pytest.mark.parametrize("rule", RULES)
def test_a_drafter_that_is_its_target_is_always_accepted(rule):
    """τ = K + 1, at every temperature and among candidates that contain the support."""
    target_params = target_table()
    perfect = drafter_tables().replace(
        logits=jnp.broadcast_to(target_params, (K, V, V, V))
    )
    batch = 4000
    keys = jax.random.split(jax.random.key(7), batch)
    tokens = jnp.broadcast_to(jnp.asarray(PROMPT, jnp.int32), (batch, 2))
    temperature = jnp.asarray([0.0, 0.3, 1.0, 2.0], jnp.float32)
    arguments = {
        "target": TARGET,
        "target_params": target_params,
        "drafter": DRAFTER,
        "drafter_params": perfect,
        "max_new_tokens": 1 + 3 * (K + 1),
    }

    @functools.partial(jax.jit, static_argnums=0)
    def run(candidates, top_k):
        return dspark_jax.speculative_generate(
            keys,
            tokens,
            jnp.full((batch,), 2, jnp.int32),
            sampling=Sampling(
                temperature=jnp.tile(temperature, batch // 4), top_k=top_k
            ),
            options=Speculation(rule=rule, candidates=candidates),
            **arguments,
        ).stats

    for candidates, top_k in ((None, V), (2, 2)):
        stats = run(candidates, jnp.int32(top_k))
        # p and q are equal to rounding: a rejection has probability 1e-7.
        np.testing.assert_array_equal(stats.num_rounds, 3)
        np.testing.assert_allclose(stats.accepted_length, K + 1)
    if rule == "seeded":
        # The winner may lie outside the candidates: then, and only then, a miss.
        stats = run(2, jnp.int32(V))
        assert K / 2 < stats.accepted_length < K + 1
        greedy = np.asarray(stats.num_rounds)[::4]
        np.testing.assert_array_equal(greedy, 3)
