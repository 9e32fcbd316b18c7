"""The "seeded" rule: the words of plain decoding, whatever is done to be faster.

A fitted golden drafter on its target, so that drafts are accepted and refused. One
program serves every limit, stop token and parameter; others differ in static choices.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dspark_jax
from dspark_jax.config import Speculation
from dspark_jax.drafters import dspark
from dspark_jax.drafters.load import load_drafter
from dspark_jax.drafters.prompt_lookup import make_prompt_lookup
from dspark_jax.sampling import Sampling
from dspark_jax.targets import decoder
from dspark_jax.targets.load import load_target
from dspark_jax.types import FINISH_LENGTH, FINISH_NON_FINITE, FINISH_STOP, Generation

B, P, NEW, V = 4, 12, 24, 128
PROMPTS = (  # three of the text that the drafter was fitted to
    (90, 20, 88, 99, 116, 5, 118, 69, 4, 77),
    (101, 13, 70, 29, 91, 20, 36, 9, 9, 114, 31),
    (32, 77, 12, 113, 120, 12, 68, 111),
    (101,),
)
LENGTHS = np.array([len(prompt) for prompt in PROMPTS], np.int32)
SAMPLING = {
    "temperature": np.array([0.4, 1.0, 0.0, 0.7], np.float32),
    "top_k": np.array([V, 20, V, 50], np.int32),
    "top_p": np.array([1.0, 1.0, 1.0, 0.9], np.float32),
}


def prompts():
    padding = np.random.default_rng(0).integers(V, size=(B, P)).astype(np.int32)
    for row, prompt in enumerate(PROMPTS):
        padding[row, : len(prompt)] = prompt
    return padding


def keys():
    return jax.random.split(jax.random.key(1), B)


def settings(rows=slice(None)):
    return Sampling(**{name: jnp.asarray(v[rows]) for name, v in SAMPLING.items()})


@pytest.fixture(scope="module")
def models(golden):
    target, target_params = load_target(golden / "targets" / "qwen3_untied")
    folder = golden / "cases" / "dspark_vanilla_b4" / "drafter"
    drafter, drafter_params = load_drafter(folder, target)
    return {
        "target": target,
        "target_params": target_params,
        "drafter": drafter,
        "drafter_params": drafter_params,
    }


@pytest.fixture(scope="module")
def plain(models):
    """Plain decoding of all rows, with log-probabilities."""

    @jax.jit
    def run(target_params):
        return dspark_jax.autoregressive_generate(
            keys(),
            jnp.asarray(prompts()),
            jnp.asarray(LENGTHS),
            target=models["target"],
            target_params=target_params,
            max_new_tokens=NEW,
            sampling=settings(),
            stop_tokens=(),
            return_logprobs=True,
        )

    return run(models["target_params"])


@pytest.fixture(scope="module")
def speculate(models):
    """One program: (limits, stop tokens, changed parameters) -> Generation."""

    @jax.jit
    def run(limits, stop_tokens, target_params, drafter_params):
        return dspark_jax.speculative_generate(
            keys(),
            jnp.asarray(prompts()),
            jnp.asarray(LENGTHS),
            target=models["target"],
            target_params=target_params,
            drafter=models["drafter"],
            drafter_params=drafter_params,
            max_new_tokens=NEW,
            sampling=settings(),
            options=Speculation(rule="seeded"),
            limits=limits,
            stop_tokens=stop_tokens,
            return_logprobs=True,
        )

    def call(limits=None, stop_tokens=None, **changed) -> Generation:
        arrays = {**models, **changed}
        limits = np.full(B, NEW) if limits is None else limits
        stops = np.full((B, 2), -1) if stop_tokens is None else stop_tokens
        return run(
            jnp.asarray(limits, jnp.int32),
            jnp.asarray(stops, jnp.int32),
            arrays["target_params"],
            arrays["drafter_params"],
        )

    return call


def words(generation, row):
    """The new tokens of one row of the common prompts."""
    return np.asarray(generation.tokens[row, LENGTHS[row] : generation.lengths[row]])


def check_words(generation, plain, counts=(NEW,) * B):
    for row, count in enumerate(counts):
        np.testing.assert_array_equal(words(generation, row), words(plain, row)[:count])


def test_words_are_those_of_plain_decoding(speculate, plain):
    found = speculate()
    check_words(found, plain)
    np.testing.assert_array_equal(found.lengths, LENGTHS + NEW)
    np.testing.assert_array_equal(found.finish, FINISH_LENGTH)
    # The prompt stays, and nothing is written beyond the end.
    for row in range(B):
        kept = np.asarray(found.tokens[row])
        np.testing.assert_array_equal(
            kept[: LENGTHS[row]], prompts()[row, : LENGTHS[row]]
        )
        # What follows the end is the input's padding.
        rest = np.zeros(P + NEW, np.int32)
        rest[:P] = prompts()[row]
        end = LENGTHS[row] + NEW
        np.testing.assert_array_equal(kept[end:], rest[end:])
    # Drafts were accepted, and some were not.
    assert 1.2 < found.stats.accepted_length < 5
    assert int(found.stats.num_rounds.max()) < NEW


def test_logprobs_equal_a_teacher_forced_pass(speculate, plain, models):
    found = speculate()
    target, params = models["target"], models["target_params"]

    @jax.jit
    def forward(tokens):
        cache = target.init_cache(*tokens.shape)
        at = jnp.broadcast_to(
            jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape
        )
        return target.unembed(params, target.forward(params, tokens, at, cache)[0])

    logits = np.asarray(forward(found.tokens), np.float64)
    for row in range(B):
        at = np.arange(LENGTHS[row], LENGTHS[row] + NEW)
        x = logits[row, at - 1]
        chosen = np.asarray(found.tokens[row])[at]
        temperature = SAMPLING["temperature"][row]
        y = x / (temperature or 1e-9)
        y = np.where(y >= np.sort(y)[:, -SAMPLING["top_k"][row], None], y, -np.inf)
        p = np.exp(y - y.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        if SAMPLING["top_p"][row] < 1:
            above = (p[:, None] * (p[:, None] > p[:, :, None])).sum(-1)
            p = np.where(above < SAMPLING["top_p"][row], p, 0)
            p /= p.sum(-1, keepdims=True)
        raw = x - np.log(np.exp(x).sum(-1, keepdims=True))
        raw = np.take_along_axis(raw, chosen[:, None], axis=1)[:, 0]
        with np.errstate(divide="ignore"):
            of_sampling = np.log(np.take_along_axis(p, chosen[:, None], axis=1)[:, 0])
        for generation in (found, plain):
            logprobs = generation.logprobs
            np.testing.assert_allclose(logprobs.raw[row, at], raw, atol=1e-4)
            np.testing.assert_allclose(
                logprobs.sampling[row, at], of_sampling, atol=1e-4
            )
            outside = np.delete(np.asarray(logprobs.raw[row]), at)
            np.testing.assert_array_equal(outside, 0)


def test_limits_end_rows_exactly(speculate, plain):
    limits = np.array([0, 1, 2, 23])
    found = speculate(limits=limits)
    check_words(found, plain, limits)
    np.testing.assert_array_equal(found.lengths, LENGTHS + limits)
    np.testing.assert_array_equal(found.finish, FINISH_LENGTH)


def test_stop_tokens_end_rows_and_are_kept(speculate, plain):
    stops = np.full((B, 2), -1)
    counts = []
    for row, index in enumerate((0, 5, 9, 23)):
        text = words(plain, row)
        stops[row, row % 2] = text[index]
        counts.append(list(text).index(text[index]) + 1)
    found = speculate(stop_tokens=stops)
    check_words(found, plain, counts)
    np.testing.assert_array_equal(found.lengths, LENGTHS + counts)
    np.testing.assert_array_equal(found.finish, FINISH_STOP)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 0.0])
def test_broken_drafters_change_nothing_but_speed(speculate, plain, models, value):
    broken = jax.tree.map(
        lambda x: jnp.full_like(x, value) if x.ndim == 2 else x,
        models["drafter_params"],
    )
    check_words(speculate(drafter_params=broken), plain)


def test_nan_in_the_target_fails_its_row_only(speculate, plain, models):
    """A row fails when it reads, writes or drafts such a token; here one only reads."""
    elsewhere = {t for row in (0, 1, 3) for t in (*words(plain, row), *PROMPTS[row])}
    read = next(t for t in PROMPTS[2] if t not in elsewhere)
    params = models["target_params"]
    poisoned = params.replace(embed=params.embed.at[read].set(np.nan))
    found = speculate(target_params=poisoned)
    check_words(found, plain, [NEW, NEW, 0, NEW])
    finish = [FINISH_LENGTH, FINISH_LENGTH, FINISH_NON_FINITE, FINISH_LENGTH]
    np.testing.assert_array_equal(found.finish, finish)


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
    padded = np.concatenate([prompts(), np.full((B, 5), 7, np.int32)], axis=1)

    @jax.jit
    def run(params, traced):
        return dspark_jax.speculative_generate(
            keys()[order],
            jnp.asarray(padded[order]),
            jnp.asarray(LENGTHS[order]),
            max_new_tokens=NEW,
            sampling=settings(order),
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
            found.tokens[place, LENGTHS[row] : end], words(plain, row)
        )


def test_samples_of_a_prompt_share_its_prefill(models, plain):
    """Row b·n + s has its own key and settings; each prompt is fed once."""
    static = {name: models[name] for name in ("target", "drafter")}
    params = {name: models[name] for name in ("target_params", "drafter_params")}

    @jax.jit
    def run(params):
        return dspark_jax.speculative_generate(
            keys()[np.array([3, 1, 0, 0])],
            jnp.asarray(prompts()[np.array([1, 0])]),
            jnp.asarray(LENGTHS[np.array([1, 0])]),
            max_new_tokens=NEW,
            sampling=settings(np.array([1, 1, 0, 0])),
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
        np.testing.assert_array_equal(text, words(plain, row))
    assert (np.asarray(found.tokens[0]) != np.asarray(found.tokens[1])).any()


@pytest.mark.parametrize("count", [0, 1])
def test_no_token_and_one_token(models, plain, count):
    arguments = {
        "target": models["target"],
        "target_params": models["target_params"],
        "max_new_tokens": count,
        "sampling": settings(),
        "stop_tokens": (),
    }
    drafter = {name: models[name] for name in ("drafter", "drafter_params")}
    prompt = (keys(), jnp.asarray(prompts()), jnp.asarray(LENGTHS))

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
        check_words(found, plain, (count,) * B)


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
            keys(),
            jnp.asarray(prompts()),
            jnp.asarray(LENGTHS),
            target=target,
            target_params=target_params,
            drafter=drafter,
            drafter_params=drafter_params,
            max_new_tokens=NEW,
            sampling=settings(),
            options=Speculation(rule=rule),
            stop_tokens=(),
        )

    found = run("seeded", models["target_params"], models["drafter_params"])
    np.testing.assert_array_equal(found.lengths, last + 1)
    np.testing.assert_array_equal(found.finish, FINISH_LENGTH)
    check_words(found, plain, last + 1 - LENGTHS)


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
