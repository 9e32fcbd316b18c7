"""The host's side of a corpus: prefixes, budgets, counts, data order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.training.texts import corpus, data, prompts


@pytest.fixture(name="tokenizer", scope="module")
def _tokenizer(tiny):
    return tiny.ByteTokenizer()


def test_fixed_parts_add_up_to_a_chat(tokenizer):
    chat = corpus.chat_tokens(tokenizer)
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "bc"},
        {"role": "user", "content": "d"},
    ]

    def letters(text):
        return tuple(17 + byte for byte in text.encode())

    parts = (
        *chat.shared,
        *chat.begin_user,
        *letters("a"),
        chat.end_of_turn,
        *chat.to_answer,
        *letters("bc"),
        chat.end_of_turn,
        *chat.to_user,
        *letters("d"),
        chat.end_of_turn,
        *chat.to_answer,
    )
    assert parts == tuple(tokenizer.encode_chat(messages))


def test_prefixes_are_of_three_kinds(tokenizer):
    chat = corpus.chat_tokens(tokenizer)
    rng = np.random.default_rng(0)
    found, domains = corpus.make_prefixes(rng, tokenizer, chat, 1000, 150)
    lengths, complete = np.asarray(found.lengths), np.asarray(found.is_complete)
    tokens = np.asarray(found.tokens)
    assert 0.25 < complete.mean() < 0.5  # 45 %, less those that are too long
    begun = ~complete & (lengths > 1)
    assert 0.1 < begun.mean() < 0.2
    for row in np.flatnonzero(begun)[:20]:
        text = bytes(t - 17 for t in tokens[row, 1 : lengths[row]]).decode()
        assert text in prompts.texts()["openings"]
    tail = (chat.end_of_turn, *chat.to_answer)
    for row in np.flatnonzero(complete)[:20]:
        end = lengths[row]
        assert tuple(tokens[row, end - len(tail) : end]) == tail
    assert np.all(tokens[:, 0] == chat.begin_user[0])
    names = np.asarray(domains)
    assert set(np.unique(names[complete])) == set(prompts.DOMAINS)
    np.testing.assert_array_equal(names == "opening", begun)
    np.testing.assert_array_equal(names == "bare", ~complete & ~begun)


def fake_rows(key, shared, prefixes):
    tokens = jax.random.randint(key, (4, 12), 0, 500)
    return data.Rows(tokens=tokens, loss_mask=tokens > 250)


def test_write_keeps_to_its_budgets(tokenizer):
    settings = {
        "vocab_size": 500,
        "batch": 4,
        "max_prefix": 40,
        "log": lambda text: None,
    }
    rows, count = corpus.write(
        0, tokenizer, fake_rows, max_batches=3, seconds=1e9, **settings
    )
    assert count == 3
    assert rows.tokens.shape == (12, 12)
    assert rows.tokens.dtype == jnp.uint16
    first, count = corpus.write(
        0, tokenizer, fake_rows, max_batches=3, seconds=0.0, **settings
    )
    assert count == 1
    np.testing.assert_array_equal(first.tokens, rows.tokens[:4])
    wide, _ = corpus.write(
        0,
        tokenizer,
        fake_rows,
        max_batches=1,
        seconds=0.0,
        **settings | {"vocab_size": 2**16 + 1},
    )
    assert wide.tokens.dtype == jnp.int32  # ids past 65,535 do not wrap around


def test_writing_ends_when_asked(tokenizer):
    _, count = corpus.write(
        0,
        tokenizer,
        fake_rows,
        vocab_size=500,
        batch=4,
        max_prefix=40,
        max_batches=9,
        seconds=1e9,
        log=lambda text: None,
        is_stopped=lambda: True,
    )
    assert count == 1
