"""The words that the engine serves have the target's law, whatever is verified.

χ² over all texts of a few tokens, many requests, budgets from old confidences; and the
world of the paper's appendix A. A planner that anticipates must fail the same tests.
"""

import jax.numpy as jnp
import numpy as np
import pytest
import table_models

import dspark_jax
from dspark_jax import serving
from dspark_jax.decoding import round
from dspark_jax.scheduling.costs import Costs, TokenCurve

pytestmark = pytest.mark.usefixtures("quick_compilation")

V, K, NUM, SLOTS = 2, 2, 6, 32
REQUESTS = 12_000
TARGET = table_models.make_attending_target(V)
DRAFTER = table_models.make_attending_drafter(V, K)
# Half and full windows cost what they bring, so that budgets move with confidences.
COSTS = Costs(
    drafting=TokenCurve(
        packed_tokens=(SLOTS, 2 * SLOTS, 3 * SLOTS),
        step_seconds=(1.0, 1.15, 1.32),
        max_tokens=3 * SLOTS,
    ),
    plain=TokenCurve(packed_tokens=(SLOTS,), step_seconds=(0.68,), max_tokens=SLOTS),
)


def target_table():
    rng = np.random.default_rng(0)
    return jnp.asarray(0.5 * rng.normal(size=(V, V)), jnp.float32)


def drafter_tables():
    """Far from the target; the confidence says much about the token before."""
    rng = np.random.default_rng(3)
    return bigram([1.2, 0.0] + 0.3 * rng.normal(size=(K, V, V)), [[3.0, -3.0]] * K)


def bigram(logits, confidence_logits):
    """A drafter that looks at the last token only: logits [K, V, V]."""
    logits = jnp.asarray(logits, jnp.float32)[:, None]
    return table_models.DrafterTables(
        logits=jnp.broadcast_to(logits, (K, V, V, V)),
        confidence_logits=jnp.asarray(confidence_logits, jnp.float32),
        look_ahead=jnp.int32(0),
    )


def serve(rule, mode, target_params, drafter_params, prompt, *, seed=0, **fields):
    """The words of REQUESTS requests, [REQUESTS, NUM], and the metrics."""
    width = 1 + K
    shapes = (1, 2, width) if mode == "compact" else (width,)
    engine = serving.Engine(
        TARGET,
        target_params,
        DRAFTER,
        drafter_params,
        config=serving.EngineConfig(
            **{
                "num_slots": SLOTS,
                "max_length": len(prompt) + NUM,
                "page_size": 8,
                "chunk": 4,
                "prefill_groups": SLOTS,
                "mode": mode,
                "rule": rule,
                "buckets": tuple(serving.Bucket(SLOTS, SLOTS * n) for n in shapes),
                "probe_every": 2,
                **fields,
            }
        ),
        costs=COSTS if mode != "static" else None,
    )
    settings = dspark_jax.Sampling(temperature=1.0)
    handles = [
        engine.submit(prompt, max_new_tokens=NUM, sampling=settings, seed=seed + i)
        for i in range(REQUESTS)
    ]
    engine.run()
    return np.array([handle.tokens for handle in handles]), engine.metrics()


def sigma(words, table, prompt):
    """χ² of the words against the target's law, in standard deviations."""
    p = np.exp(np.asarray(table, np.float64))
    p /= p.sum(-1, keepdims=True)
    texts = np.array(list(np.ndindex(*[V] * NUM)))
    before = np.concatenate([np.full((len(texts), 1), prompt[-1]), texts], axis=1)
    law = np.prod([p[before[:, i], before[:, i + 1]] for i in range(NUM)], axis=0)
    index = words @ V ** np.arange(NUM)[::-1]
    counts = np.bincount(index, minlength=V**NUM)
    expected = law * len(words)
    assert expected.min() > 5
    chi2 = np.sum((counts - expected) ** 2 / expected)
    return (chi2 - len(law) + 1) / np.sqrt(2 * (len(law) - 1))


def anticipate(window, confidence, budget):
    """Whole windows where the finished block promises most: what may not be done."""
    return jnp.where(confidence[:, 1] > 0.5, window, 0)


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("mode", ["compact", "cap-accept"])
def test_words_have_the_targets_law(rule, mode):
    words, metrics = serve(rule, mode, target_table(), drafter_tables(), [1])
    assert abs(sigma(words, target_table(), [1])) < 5
    # Windows of several lengths ran, and some drafts were refused.
    assert min(metrics["verify_length_counts"][:2]) > 100
    assert 0.2 < metrics["acceptance"] < 0.9
    if mode == "compact":
        assert {"verify 32x64", "verify 32x96"} <= set(metrics["steps"])


@pytest.mark.parametrize("rule", ["token", "block"])
def test_an_anticipating_budget_fails(rule, monkeypatch):
    monkeypatch.setattr(round, "_allocate", anticipate)
    # Another number of stop tokens, so that another program is compiled.
    words, _ = serve(
        rule, "cap-accept", target_table(), drafter_tables(), [1], max_stop_tokens=7
    )
    assert sigma(words, target_table(), [1]) > 15


def appendix_a():
    """p = (0.7, 0.3); the drafter guesses evenly, and after B promises nothing."""
    table = jnp.tile(jnp.asarray([[0.7, 0.3]], jnp.float32), (V, 1))
    drafter = bigram(np.zeros((K, V, V)), [[0.0, 0.0], [2.2, -9.0]])
    return jnp.log(table), drafter


@pytest.mark.parametrize("rule", ["token", "block"])
def test_appendix_a_gives_seven_tenths(rule, monkeypatch):
    table, drafter = appendix_a()
    words, _ = serve(rule, "compact", table, drafter, [0])
    shares = (words == 0).mean(0)
    deviation = np.sqrt(0.21 / len(words))
    assert np.all(np.abs(shares - 0.7) < 5 * deviation)
    monkeypatch.setattr(round, "_allocate", anticipate)
    words, _ = serve(rule, "cap-accept", table, drafter, [0], max_stop_tokens=7)
    # The first token comes from the prefill, the second is the first that is drafted.
    assert (words == 0).mean(0)[1] > 0.7 + 15 * deviation
