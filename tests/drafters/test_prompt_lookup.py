"""Prompt lookup: what it matches, what it offers, and that words stay the target's."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dspark_jax
from dspark_jax import draft_sampler, testing

CAPACITY = 16


def rows(*texts):
    return np.array([text + [-1] * (CAPACITY - len(text)) for text in texts], np.int32)


@pytest.fixture(scope="module")
def propose():
    """(texts, stale) -> (tokens, offered): the last token of a text is the anchor.

    Everything goes through `observe`, at one shape: one program for all cases.
    """
    drafter, params = dspark_jax.make_prompt_lookup(block_size=4, max_ngram=3)

    @jax.jit
    def run(history, positions, stale, stale_positions, anchor, position):
        batch = history.shape[0]
        state = drafter.init_state(batch, CAPACITY)
        state = drafter.observe(params, state, stale, stale_positions, None)
        state = drafter.observe(params, state, history, positions, None)
        sampler = draft_sampler.make_draft_sampler(
            jax.random.split(jax.random.key(0), batch),
            position,
            dspark_jax.Sampling(),
            draft_length=4,
            rule="token",
        )
        draft, _ = drafter.propose(params, (), state, anchor, position, sampler)
        return draft

    def call(texts, stale=None):
        padded = rows(*texts, *([[0]] * (4 - len(texts))))
        last = np.sum(padded >= 0, axis=1).astype(np.int32) - 1
        index = np.arange(CAPACITY, dtype=np.int32)[None]
        positions = np.where(index < last[:, None], index, -1).astype(np.int32)
        anchor = padded[np.arange(4), last]
        old = np.full((4, CAPACITY), -1, np.int32)
        if stale is not None:
            old[: len(stale)] = rows(*stale)
        old_positions = np.where(old >= 0, index, -1).astype(np.int32)
        draft = run(padded, positions, old, old_positions, anchor, last)
        return draft, np.array(draft.tokens), np.array(draft.length)

    return call


def test_it_copies_what_followed_the_match(propose):
    _, tokens, offered = propose(
        [
            [5, 6, 7, 8, 9, 1, 5, 6],  # 5 6 was followed by 7 8 9 1
            [1, 2, 3, 9, 1, 2, 4, 1, 2],  # the later of two 2-grams: 4 1 2
            [1, 2, 3, 7, 2, 3, 8, 1, 2, 3],  # the longer match beats the later one
            [3, 4, 5],  # nothing matches
        ]
    )
    np.testing.assert_array_equal(tokens[0], [7, 8, 9, 1])
    np.testing.assert_array_equal(tokens[1], [4, 1, 2, 2])
    np.testing.assert_array_equal(tokens[2], [7, 2, 3, 8])
    np.testing.assert_array_equal(offered, [4, 3, 4, 0])


def test_fewer_slots_where_the_text_ends_and_all_hold_valid_ids(propose):
    _, tokens, offered = propose([[4, 9, 9], [1, 2, 1, 2], [7, 7], [6]])
    # The copy may run into the text it continues, up to the anchor.
    np.testing.assert_array_equal(offered, [1, 2, 1, 0])
    np.testing.assert_array_equal(tokens[0], [9, 9, 9, 9])
    np.testing.assert_array_equal(tokens[1], [1, 2, 2, 2])
    np.testing.assert_array_equal(tokens[2], [7, 7, 7, 7])
    np.testing.assert_array_equal(tokens[3], [6, 6, 6, 6])


def test_stale_tokens_at_or_after_the_anchor_are_not_copied(propose):
    text, stale = [5, 6, 7, 5, 6], [0, 0, 0, 0, 9, 5, 6, 7, 8, 5, 6, 1]
    _, tokens, offered = propose([text, [3, 4, 5]], [stale, [3, 4, 5, 5, 8, 3, 4, 5]])
    clean_draft, clean_tokens, clean_offered = propose([text, [3, 4, 5]])
    np.testing.assert_array_equal(tokens, clean_tokens)
    np.testing.assert_array_equal(offered, clean_offered)
    np.testing.assert_array_equal(offered[:2], [3, 0])
    np.testing.assert_array_equal(tokens[0], [7, 5, 6, 6])
    assert clean_draft.confidence_logits is None


def test_rows_are_independent(propose):
    texts = [[5, 6, 7, 8, 5, 6], [1, 1, 1], [2, 3, 2, 3, 2], [9]]
    _, together, offered = propose(texts)
    for row, text in enumerate(texts):
        _, alone, length = propose([text])
        np.testing.assert_array_equal(alone[0], together[row])
        assert length[0] == offered[row]


def test_a_draft_is_a_point_mass_on_its_tokens(propose):
    draft, tokens, _ = propose([[5, 6, 7, 8, 5, 6]])
    np.testing.assert_array_equal(draft.row.point, tokens)
    np.testing.assert_array_equal(draft.ids[..., 0], tokens)
    np.testing.assert_array_equal(draft.probability, np.ones((4, 4), np.float32))


def test_words_equal_plain_decoding():
    models = testing.make_tiny_models(vocab_size=7, target_fields={"stop_tokens": (6,)})
    drafter, drafter_params = dspark_jax.make_prompt_lookup(block_size=3)
    tokens = jnp.array([[1, 2, 3, 1, 2, 3, 1, 2], [4, 4, 4, 0, 0, 0, 0, 0]], jnp.int32)
    lengths = jnp.array([8, 3], jnp.int32)
    keys = jax.random.split(jax.random.key(7), 2)
    both = {"target": models.target, "max_new_tokens": 14, "return_logprobs": True}

    @jax.jit
    def speculate(target_params, temperature):
        return dspark_jax.speculative_generate(
            keys,
            tokens,
            lengths,
            target_params=target_params,
            drafter=drafter,
            drafter_params=drafter_params,
            sampling=dspark_jax.Sampling(temperature=temperature),
            options=dspark_jax.Speculation(rule="seeded"),
            **both,
        )

    @jax.jit
    def plain(target_params, temperature):
        return dspark_jax.autoregressive_generate(
            keys,
            tokens,
            lengths,
            target_params=target_params,
            sampling=dspark_jax.Sampling(temperature=temperature),
            **both,
        )

    accepted = 0
    for temperature in (0.0, 0.5, 1.0):
        got = speculate(models.target_params, temperature)
        want = plain(models.target_params, temperature)
        np.testing.assert_array_equal(got.tokens, want.tokens)
        np.testing.assert_array_equal(got.lengths, want.lengths)
        np.testing.assert_array_equal(got.finish, want.finish)
        np.testing.assert_allclose(got.logprobs.raw, want.logprobs.raw, atol=1e-4)
        accepted += int(got.stats.num_accepted.sum())
        assert np.all(got.stats.num_accepted <= got.stats.num_verified)
    assert accepted > 0


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"block_size": 0}, ValueError, "block_size must be positive, got 0"),
        ({"block_size": 2.5}, TypeError, "block_size must be int, got 2.5"),
        (
            {"min_ngram": 4},
            ValueError,
            "min_ngram must lie in 1..max_ngram, got 4 and max_ngram 3",
        ),
        (
            {"min_ngram": 0},
            ValueError,
            "min_ngram must lie in 1..max_ngram, got 0 and max_ngram 3",
        ),
    ],
)
def test_bad_configurations(arguments, error, message):
    with pytest.raises(error, match=re.escape(message)):
        dspark_jax.make_prompt_lookup(**arguments)


def test_equal_arguments_give_equal_drafters():
    one, _ = dspark_jax.make_prompt_lookup(block_size=4)
    two, _ = dspark_jax.make_prompt_lookup(block_size=4)
    assert one == two
    assert hash(one) == hash(two)
