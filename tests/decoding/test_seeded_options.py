"""The "seeded" rule gives plain decoding's words, whatever else a caller changes.

Static choices, each of which is another program: drafting, neighbours and padding,
samples of a prompt, the least and the most tokens, and a second turn.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import plain_rows
import pytest
from plain_rows import LENGTHS, NEW, B, P, V

import dspark_jax
from dspark_jax.config import Speculation
from dspark_jax.drafters import dspark
from dspark_jax.drafters.prompt_lookup import make_prompt_lookup
from dspark_jax.sampling import Sampling
from dspark_jax.targets import decoder
from dspark_jax.types import FINISH_LENGTH


@pytest.fixture(scope="module")
def models(golden):
    return plain_rows.load_models(golden)


@pytest.fixture(scope="module")
def plain(golden):
    return plain_rows.generate(golden)


def keep_likely(slot, confidence, survival):
    return (survival > 0.2) | (slot == 0)


@pytest.mark.parametrize(
    "change",
    [
        {"options": {"draft_length": 1, "candidates": 4}, "order": [2, 0, 3]},
        {
            "options": {"draft_length": 3, "keep": keep_likely},
            "order": [1, 1, 3, 2, 0],
            "confidence_threshold": np.array([0.5, 0.0, 0.3, 0.4, 1.0], np.float32),
            "confidence_temperatures": np.array([1.0, 2.0, 0.5], np.float32),
            "draft_vocabulary": np.arange(0, V, 3),
        },
        {"options": {}, "order": [0, 3], "prompt_lookup": True},
    ],
    ids=["candidates", "windows and draft vocabulary", "prompt lookup"],
)
def test_options_neighbours_and_padding_change_nothing(models, plain, change):
    """Other rows, order and padding too; every row keeps its key."""
    models, order = dict(models), np.array(change["order"])
    if "draft_vocabulary" in change:
        models["drafter_params"] = dspark.with_draft_vocabulary(
            models["drafter_params"],
            models["target"],
            models["target_params"],
            change["draft_vocabulary"],
        )
    if "prompt_lookup" in change:
        models["drafter"], models["drafter_params"] = make_prompt_lookup(5)
    traced = {name: change[name] for name in change if name.startswith("confidence")}
    static = {name: models.pop(name) for name in ("target", "drafter")}
    padded = np.concatenate(
        [plain_rows.prompts(), np.full((B, 5), 7, np.int32)], axis=1
    )

    @jax.jit
    def run(params, traced):
        return dspark_jax.speculative_generate(
            plain_rows.keys()[order],
            jnp.asarray(padded[order]),
            jnp.asarray(LENGTHS[order]),
            max_new_tokens=NEW,
            sampling=plain_rows.settings(order),
            options=Speculation(rule="seeded", **change["options"]),
            stop_tokens=(),
            **static,
            **params,
            **traced,
        )

    found = run(models, traced)
    for place, row in enumerate(order):
        end = LENGTHS[row] + NEW
        assert int(found.lengths[place]) == end
        np.testing.assert_array_equal(
            found.tokens[place, LENGTHS[row] : end], plain_rows.words(plain, row)
        )


def test_samples_of_a_prompt_share_its_prefill(models, plain):
    """Row b·n + s has its own key and settings; each prompt is fed once."""
    static = {name: models[name] for name in ("target", "drafter")}
    params = {name: models[name] for name in ("target_params", "drafter_params")}

    @jax.jit
    def run(params):
        return dspark_jax.speculative_generate(
            plain_rows.keys()[np.array([3, 1, 0, 0])],
            jnp.asarray(plain_rows.prompts()[np.array([1, 0])]),
            jnp.asarray(LENGTHS[np.array([1, 0])]),
            max_new_tokens=NEW,
            sampling=plain_rows.settings(np.array([1, 1, 0, 0])),
            options=Speculation(rule="seeded"),
            stop_tokens=(),
            num_samples=2,
            **static,
            **params,
        )

    found = run(params)
    np.testing.assert_array_equal(found.lengths, LENGTHS[[1, 1, 0, 0]] + NEW)
    for place, row in ((1, 1), (2, 0), (3, 0)):
        text = found.tokens[place, LENGTHS[row] : LENGTHS[row] + NEW]
        np.testing.assert_array_equal(text, plain_rows.words(plain, row))
    assert (np.asarray(found.tokens[0]) != np.asarray(found.tokens[1])).any()


@pytest.mark.parametrize("count", [0, 1])
def test_no_token_and_one_token(models, plain, count):
    arguments = {
        "target": models["target"],
        "target_params": models["target_params"],
        "max_new_tokens": count,
        "sampling": plain_rows.settings(),
        "stop_tokens": (),
    }
    drafter = {name: models[name] for name in ("drafter", "drafter_params")}
    prompt = (
        plain_rows.keys(),
        jnp.asarray(plain_rows.prompts()),
        jnp.asarray(LENGTHS),
    )

    @jax.jit
    def run():
        return (
            dspark_jax.speculative_generate(*prompt, **arguments, **drafter),
            dspark_jax.autoregressive_generate(*prompt, **arguments),
        )

    for found in run():
        assert found.tokens.shape == (B, P + count)
        np.testing.assert_array_equal(found.lengths, LENGTHS + count)
        np.testing.assert_array_equal(found.finish, FINISH_LENGTH)
        plain_rows.check_words(found, plain, (count,) * B)


def test_the_last_position_is_used_and_not_passed(models, plain):
    """The token after the last position can still be drawn, never fed."""
    last = 14
    config = dataclasses.replace(models["target"].config, max_position=last)
    target = decoder.make_target(config)
    config = dataclasses.replace(models["drafter"].config, max_position=last)
    drafter = dspark.make_drafter(config, target)

    @functools.partial(jax.jit, static_argnums=0)
    def run(rule, target_params, drafter_params):
        return dspark_jax.speculative_generate(
            plain_rows.keys(),
            jnp.asarray(plain_rows.prompts()),
            jnp.asarray(LENGTHS),
            target=target,
            target_params=target_params,
            drafter=drafter,
            drafter_params=drafter_params,
            max_new_tokens=NEW,
            sampling=plain_rows.settings(),
            options=Speculation(rule=rule),
            stop_tokens=(),
        )

    found = run("seeded", models["target_params"], models["drafter_params"])
    np.testing.assert_array_equal(found.lengths, last + 1)
    np.testing.assert_array_equal(found.finish, FINISH_LENGTH)
    plain_rows.check_words(found, plain, last + 1 - LENGTHS)


def test_two_turns_equal_one_long_prompt(models):
    """`extend`, on prompts longer than one prefill chunk."""
    first, second, answer = 140, 40, 10
    rng = np.random.default_rng(5)
    turn_1 = rng.integers(V, size=(3, first)).astype(np.int32)
    turn_2 = rng.integers(V, size=(3, second)).astype(np.int32)
    lengths_1 = np.array([140, 129, 3], np.int32)
    lengths_2 = np.array([7, 40, 0], np.int32)
    key = jax.random.split(jax.random.key(2), 3)
    sampling = Sampling(temperature=jnp.asarray([0.8, 1.0, 0.0], jnp.float32))
    static = {"target": models["target"], "drafter": models["drafter"]}
    options = Speculation(rule="seeded")
    capacity = first + answer + second + answer

    @jax.jit
    def chat(target_params, drafter_params):
        common = {
            **static,
            "target_params": target_params,
            "drafter_params": drafter_params,
            "sampling": sampling,
            "options": options,
            "stop_tokens": (),
        }
        state = dspark_jax.prefill(
            key,
            jnp.asarray(turn_1),
            jnp.asarray(lengths_1),
            capacity=capacity,
            max_new_tokens=answer,
            **common,
        )
        state = dspark_jax.speculative_rounds(state, None, **common)
        answered = (state.tokens, state.lengths)
        state = dspark_jax.extend(
            state,
            jnp.asarray(turn_2),
            jnp.asarray(lengths_2),
            max_new_tokens=answer,
            **common,
        )
        state = dspark_jax.speculative_rounds(state, None, **common)
        return answered, (state.tokens, state.lengths)

    @jax.jit
    def plain(tokens, lengths, target_params):
        found = dspark_jax.autoregressive_generate(
            key,
            tokens,
            lengths,
            target=models["target"],
            target_params=target_params,
            max_new_tokens=answer,
            sampling=sampling,
            stop_tokens=(),
        )
        return found.tokens, found.lengths

    answered, final = chat(models["target_params"], models["drafter_params"])
    width = first + answer + second
    begun = np.zeros((3, width), np.int32)
    begun[:, :first] = turn_1
    for expected, found in (
        (
            plain(jnp.asarray(begun), jnp.asarray(lengths_1), models["target_params"]),
            answered,
        ),
        (None, final),
    ):
        if expected is None:
            text = np.zeros((3, width), np.int32)
            lengths = lengths_1 + answer + lengths_2
            for row in range(3):
                split = lengths_1[row] + answer
                text[row, :split] = np.asarray(answered[0])[row, :split]
                text[row, split : lengths[row]] = turn_2[row, : lengths_2[row]]
            expected = plain(
                jnp.asarray(text), jnp.asarray(lengths), models["target_params"]
            )
        np.testing.assert_array_equal(expected[1], found[1])
        for row in range(3):
            end = int(found[1][row])
            np.testing.assert_array_equal(found[0][row, :end], expected[0][row, :end])
