"""Self-written rows: their grammar, the draws behind them, and determinism."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.config import BlockConfig, DecoderConfig
from dspark_jax.targets import decoder
from dspark_jax.training.texts import data

pytestmark = pytest.mark.usefixtures("quick_compilation")

SHARED = (3, 4, 5)
CONFIG = data.DataConfig(
    length=60,
    end_of_turn=2,
    to_answer=(6, 7),
    to_user=(6, 8, 9),
    banned=(0, 1),
    max_user=7,
)
BATCH = 24


@pytest.fixture(name="target", scope="module")
def _target():
    block = BlockConfig(
        width=16, num_heads=2, num_kv_heads=1, head_width=8, ffn_width=24
    )
    config = DecoderConfig(vocab_size=32, num_layers=2, block=block, max_position=64)
    return decoder.make_target(config), decoder.init(jax.random.key(0), config)


@pytest.fixture(name="prefixes", scope="module")
def _prefixes():
    lengths = np.arange(BATCH) % 4 + 1
    tokens = np.where(np.arange(5) < lengths[:, None], 10 + np.arange(5), 0)
    return data.Prefixes(
        tokens=jnp.asarray(tokens, jnp.int32),
        lengths=jnp.asarray(lengths, jnp.int32),
        is_complete=jnp.asarray(np.arange(BATCH) % 3 == 0),
    )


def write(key, target, prefixes):
    compiled = jax.jit(data.write_rows, static_argnames=("target", "config"))
    return compiled(
        key,
        jnp.asarray(SHARED, jnp.int32),
        prefixes,
        target[1],
        target=target[0],
        config=CONFIG,
    )


@pytest.fixture(name="rows", scope="module")
def _rows(target, prefixes):
    return write(jax.random.key(5), target, prefixes)


def test_rows_follow_the_grammar(rows, prefixes):
    """Reads every row back with a parser written the other way round."""
    seen = {"user": 0, "cut": 0, "answer": 0}
    for row in range(BATCH):
        tokens = np.asarray(rows.tokens[row]).tolist()
        length = int(prefixes.lengths[row])
        start = len(SHARED) + length
        assert tuple(tokens[: len(SHARED)]) == SHARED
        assert tokens[len(SHARED) : start] == list(range(10, 10 + length))
        mask, at = [False] * start, start
        is_answer = bool(prefixes.is_complete[row])
        while at < CONFIG.length:
            turn = tokens[at:]
            if 2 in turn:
                turn = turn[: turn.index(2) + 1]
            assert not {0, 1} & set(turn)
            mask += [is_answer] * len(turn)
            at += len(turn)
            seen["answer" if is_answer else "user"] += 1
            if not is_answer:
                assert len(turn) <= CONFIG.max_user + 1
                seen["cut"] += len(turn) == CONFIG.max_user + 1
            header = CONFIG.to_user if is_answer else CONFIG.to_answer
            header = list(header)[: CONFIG.length - at]
            assert tokens[at : at + len(header)] == header
            mask += [False] * len(header)
            at += len(header)
            is_answer = not is_answer
        np.testing.assert_array_equal(rows.loss_mask[row], mask)
    assert min(seen.values()) > 3, seen


def test_the_same_key_writes_the_same_rows(rows, target, prefixes):
    again = write(jax.random.key(5), target, prefixes)
    other = write(jax.random.key(6), target, prefixes)
    np.testing.assert_array_equal(again.tokens, rows.tokens)
    assert np.any(np.asarray(other.tokens) != np.asarray(rows.tokens))


def test_greedy_answers_are_the_targets_own(rows, target, prefixes):
    """Answers of rows at T = 0 are the argmax of an ordinary pass with a cache."""
    model, params = target
    config = data.DataConfig(
        length=40, to_answer=(6, 7), to_user=(6, 8), temperatures=(0.0,), shares=(1.0,)
    )
    found = jax.jit(data.write_rows, static_argnames=("target", "config"))(
        jax.random.key(1),
        jnp.asarray(SHARED, jnp.int32),
        prefixes,
        params,
        target=model,
        config=config,
    )
    positions = jnp.broadcast_to(jnp.arange(40, dtype=jnp.int32)[None], (BATCH, 40))
    hidden, _, _ = model.forward(
        params, found.tokens, positions, model.init_cache(BATCH, 40)
    )
    best = np.argmax(model.unembed(params, hidden), axis=-1)[:, :-1]
    mask = np.asarray(found.loss_mask)[:, 1:]
    assert mask.any()
    np.testing.assert_array_equal(best[mask], np.asarray(found.tokens)[:, 1:][mask])


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 1.0), (1.0, 0.8)])
def test_draws_have_the_right_frequencies(temperature, top_p):
    logits = jnp.asarray([2.0, 0.1, -1.0, 1.5, -7.0, 0.0, 0.7, -0.4])
    count = 40_000
    drawn = data.sample_tokens(
        jax.random.key(0),
        jnp.broadcast_to(logits[None], (count, 8)),
        jnp.full(count, temperature),
        jnp.full(count, top_p),
    )
    p = np.exp(np.float64(logits) / temperature)
    p /= p.sum()
    order = np.argsort(-p)
    above = np.cumsum(p[order]) - p[order]
    p[order[above >= top_p]] = 0
    p /= p.sum()
    found = np.bincount(drawn, minlength=8)
    assert np.all(found[p == 0] == 0)
    assert np.all(np.abs(found - count * p) <= 5 * np.sqrt(count * p * (1 - p)) + 1e-9)


def test_temperature_zero_takes_the_largest():
    logits = jax.random.normal(jax.random.key(0), (9, 48), jnp.float32)
    drawn = data.sample_tokens(jax.random.key(1), logits, jnp.zeros(9), jnp.ones(9))
    np.testing.assert_array_equal(drawn, np.argmax(logits, axis=-1))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shares": (1.0,)}, "must have one entry each, got 3 and 1"),
        ({"shares": (0.2, 0.2, 0.2)}, r"shares must sum to 1, got \(0.2, 0.2, 0.2\)"),
        ({"user_top_p": 0.0}, r"user_top_p must lie in \(0, 1\], got 0.0"),
    ],
)
def test_bad_configurations(changes, message):
    with pytest.raises(ValueError, match=message):
        data.DataConfig(to_answer=(1,), to_user=(1,), **changes)
