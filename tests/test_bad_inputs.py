"""Bad inputs: a row per public argument, with the message; no work is done before it.

The target of these tests raises if anything of it is called.
"""

import dataclasses
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dspark_jax
from dspark_jax import config as config_lib
from dspark_jax import testing
from dspark_jax.config import BlockConfig, DecoderConfig, DrafterConfig, RopeConfig
from dspark_jax.decoding import generate
from dspark_jax.sampling import Sampling
from dspark_jax.types import DecodeState, Stats

VOCAB, MAX_POSITION, BLOCK_SIZE = 19, 16, 3


def work(*args, **kwargs):
    raise AssertionError("work was done before the argument was checked")


def keep_a_float(k, confidence, survival):
    return survival


@pytest.fixture(scope="module")
def models():
    made = testing.make_tiny_models(
        vocab_size=VOCAB,
        block_size=BLOCK_SIZE,
        target_fields={"max_position": MAX_POSITION, "fingerprint": "mine"},
    )
    target = made.target._replace(
        forward=work, init_cache=work, unembed=work, embed=work
    )
    drafter = made.drafter._replace(init_state=work, observe=work, propose=work)
    return made._replace(target=target, drafter=drafter)


@pytest.fixture
def good(models):
    return {
        "key": jax.random.key(0),
        "tokens": np.full((2, 5), 7, np.int32),
        "lengths": np.array([5, 3], np.int32),
        "target": models.target,
        "target_params": models.target_params,
        "drafter": models.drafter,
        "drafter_params": models.drafter_params,
        "max_new_tokens": 4,
    }


@pytest.fixture
def state():
    zeros = jnp.zeros((2,), jnp.int32)
    slots = jnp.zeros((2, BLOCK_SIZE), jnp.int32)
    return DecodeState(
        key=jax.random.split(jax.random.key(0), 2),
        tokens=jnp.full((2, 12), 7, jnp.int32),
        lengths=jnp.array([5, 4], jnp.int32),
        limits=jnp.array([9, 9], jnp.int32),
        finish=zeros,
        target_cache=(),
        drafter_state=(),
        stats=Stats(zeros, zeros, zeros, zeros, slots, slots, slots),
        logprobs=None,
    )


def without_confidence(drafter):
    config = dataclasses.replace(drafter.config, confidence_kind="none")
    return drafter._replace(config=config)


def of(**changes):
    """A change to the good arguments: the drafter with other configuration fields."""

    def change(good):
        config = dataclasses.replace(good["drafter"].config, **changes)
        return {"drafter": good["drafter"]._replace(config=config)}

    return change


def ints(*values):
    return np.array(values, np.int32)


def sampled(**fields):
    return {"sampling": Sampling(**{"temperature": 1.0, **fields})}


VOCABULARY = "0..18 (the vocabulary)"
BOTH = {  # speculative_generate and autoregressive_generate
    "key raw": (
        lambda good: {"key": jax.random.PRNGKey(0)},
        TypeError,
        "`key` must be a typed key or typed keys [B] (jax.random.key), got uint32",
    ),
    "key a seed": (
        {"key": 3},
        TypeError,
        "`key` must be a typed key or typed keys [B] (jax.random.key), got int",
    ),
    "key count": (
        lambda good: {"key": jax.random.split(jax.random.key(0), 3)},
        ValueError,
        "`key` must have shape (B) = (2,), got (3,)",
    ),
    "tokens none": ({"tokens": None}, TypeError, "`tokens` must be an array or nested"),
    "tokens ragged": (
        {"tokens": [[1, 2], [3]]},
        TypeError,
        "`tokens` must be an array or nested lists of equal length, got [[1, 2], [3]]",
    ),
    "tokens rank": (
        {"tokens": ints(1, 2, 3)},
        ValueError,
        "`tokens` must have 2 axes (B P), got shape (3,)",
    ),
    "tokens dtype": (
        {"tokens": np.ones((2, 5), np.float32)},
        TypeError,
        "`tokens` must hold integers, got float32",
    ),
    "tokens bool": (
        {"tokens": np.ones((2, 5), bool)},
        TypeError,
        "`tokens` must hold integers, got bool",
    ),
    "tokens no request": (
        {"tokens": np.zeros((0, 5), np.int32), "lengths": ints()},
        ValueError,
        "`tokens` must hold at least one request, got 0",
    ),
    "tokens no column": (
        {"tokens": np.zeros((2, 0), np.int32)},
        ValueError,
        "`tokens` must hold at least one token a row, got 0",
    ),
    "tokens too large": (
        {"tokens": np.full((2, 5), VOCAB)},
        ValueError,
        f"`tokens` must lie in {VOCABULARY}, got 19",
    ),
    "tokens negative": (
        {"tokens": np.full((2, 5), -100)},
        ValueError,
        f"`tokens` must lie in {VOCABULARY}, got -100",
    ),
    "tokens of 64 bits": (
        {"tokens": np.full((2, 5), 2**32 + 1, np.int64)},
        ValueError,
        f"`tokens` must lie in {VOCABULARY}, got 4294967297",
    ),
    "tokens longer than the target": (
        {"tokens": np.full((2, MAX_POSITION + 1), 7, np.int32)},
        ValueError,
        "`tokens` must not be wider than the target's max_position 16, got 17",
    ),
    "lengths empty prompt": (
        {"lengths": ints(5, 0)},
        ValueError,
        "`lengths` must lie in 1..5, got 0",
    ),
    "lengths too long": (
        {"lengths": ints(5, 6)},
        ValueError,
        "`lengths` must lie in 1..5, got 6",
    ),
    "lengths shape": (
        {"lengths": ints(5, 3, 1)},
        ValueError,
        "`lengths` must have shape (B) = (2,), got (3,)",
    ),
    "lengths scalar": (
        {"lengths": 5},
        ValueError,
        "`lengths` must have shape (B) = (2,), got ()",
    ),
    "lengths dtype": (
        {"lengths": np.array([5.0, 3.0])},
        TypeError,
        "`lengths` must hold integers, got float",
    ),
    "target": ({"target": "gpt"}, TypeError, "`target` must be a Target, got str"),
    "max_new_tokens negative": (
        {"max_new_tokens": -1},
        ValueError,
        "`max_new_tokens` must be at least 0, got -1",
    ),
    "max_new_tokens float": (
        {"max_new_tokens": 4.0},
        TypeError,
        "`max_new_tokens` must be an int, got 4.0",
    ),
    "max_new_tokens bool": (
        {"max_new_tokens": True},
        TypeError,
        "`max_new_tokens` must be an int, got True",
    ),
    "limits too large": (
        {"limits": ints(4, 5)},
        ValueError,
        "`limits` must lie in 0..max_new_tokens = 0..4, got 5",
    ),
    "limits negative": (
        {"limits": ints(-1, 4)},
        ValueError,
        "`limits` must lie in 0..max_new_tokens = 0..4, got -1",
    ),
    "limits shape": (
        {"limits": 4},
        ValueError,
        "`limits` must have shape (B) = (2,), got ()",
    ),
    "limits dtype": (
        {"limits": np.array([1.5, np.nan])},
        TypeError,
        "`limits` must hold integers, got float",
    ),
    "limits without tokens": (
        {"limits": ints(1, 0), "max_new_tokens": 0},
        ValueError,
        "`limits` must lie in 0..max_new_tokens = 0..0, got 1",
    ),
    "stop_tokens too large": (
        {"stop_tokens": (2, VOCAB)},
        ValueError,
        f"`stop_tokens` must lie in {VOCABULARY}, or be the padding -1, got 19",
    ),
    "stop_tokens negative": (
        {"stop_tokens": [-2]},
        ValueError,
        f"`stop_tokens` must lie in {VOCABULARY}, or be the padding -1, got -2",
    ),
    "stop_tokens float": (
        {"stop_tokens": [1.5]},
        TypeError,
        "`stop_tokens` must hold integers, got float",
    ),
    "stop_tokens scalar": (
        {"stop_tokens": 2},
        ValueError,
        "`stop_tokens` must have shape (n,) or (B, n) = (2, n), got ()",
    ),
    "stop_tokens rows": (
        {"stop_tokens": [[1], [2], [3]]},
        ValueError,
        "`stop_tokens` must have shape (n,) or (B, n) = (2, n), got (3, 1)",
    ),
    "stop_tokens a set": ({"stop_tokens": {2}}, TypeError, "`stop_tokens` must be an"),
    "num_samples": (
        {"num_samples": 0},
        ValueError,
        "`num_samples` must be at least 1, got 0",
    ),
    "num_samples float": (
        {"num_samples": 2.0},
        TypeError,
        "`num_samples` must be an int, got 2.0",
    ),
    "num_samples with keys per prompt": (
        lambda good: {"num_samples": 2, "key": jax.random.split(jax.random.key(0), 2)},
        ValueError,
        "`key` must have shape (B) = (4,), got (2,)",
    ),
    "return_state of nothing": (
        {"return_state": True, "max_new_tokens": 0},
        ValueError,
        "`return_state` needs `max_new_tokens` >= 1, got 0",
    ),
    "sampling": (
        {"sampling": 0.7},
        TypeError,
        "`sampling` must be a Sampling, got float",
    ),
    "temperature negative": (
        sampled(temperature=-0.5),
        ValueError,
        "`sampling.temperature` must be >= 0, got -0.5",
    ),
    "temperature nan": (
        sampled(temperature=float("nan")),
        ValueError,
        "`sampling.temperature` must be >= 0, got nan",
    ),
    "temperature text": (
        sampled(temperature="hot"),
        TypeError,
        "`sampling.temperature` must hold numbers, got 'hot'",
    ),
    "temperature shape": (
        sampled(temperature=np.ones((3,), np.float32)),
        ValueError,
        "`sampling.temperature` must have shape () or (B,) = (2,), got (3,)",
    ),
    "top_k 0": (sampled(top_k=0), ValueError, "`sampling.top_k` must be >= 1, got 0"),
    "top_k float": (
        sampled(top_k=2.5),
        TypeError,
        "`sampling.top_k` must hold integers, got 2.5",
    ),
    "top_p 0": (
        sampled(top_p=0.0),
        ValueError,
        "`sampling.top_p` must be in (0, 1], got 0.0",
    ),
    "top_p above 1": (
        sampled(top_p=1.5),
        ValueError,
        "`sampling.top_p` must be in (0, 1], got 1.5",
    ),
    "min_p": (
        sampled(min_p=2),
        ValueError,
        "`sampling.min_p` must be in [0, 1], got 2",
    ),
    "min_p of one row": (
        sampled(min_p=np.array([0.1, -0.1])),
        ValueError,
        "`sampling.min_p` must be in [0, 1], got [ 0.1 -0.1]",
    ),
    "cut without a temperature": (
        {"sampling": Sampling(top_p=0.9)},
        ValueError,
        "`sampling.top_p` needs `sampling.temperature`: without one decoding is greedy",
    ),
}
SPECULATIVE = {
    "drafter missing": (
        {"drafter": None},
        TypeError,
        "`drafter` must be a Drafter, got NoneType",
    ),
    "drafter": (
        {"drafter": "dspark"},
        TypeError,
        "`drafter` must be a Drafter, got str",
    ),
    "drafter of another target": (
        of(target_fingerprint="yours"),
        ValueError,
        "`drafter` was made for another target: its fingerprint is yours, the target's "
        "is mine",
    ),
    "drafter of another vocabulary": (
        of(vocab_size=20),
        ValueError,
        "`drafter` was made for another target: its vocab_size is 20, the target's",
    ),
    "drafter of a deeper target": (
        of(num_target_layers=9),
        ValueError,
        "`drafter` was made for another target: its num_target_layers is 9, the "
        "target's is 2",
    ),
    "drafter taps too deep": (
        lambda good: {
            "drafter": good["drafter"]._replace(
                config=types.SimpleNamespace(
                    block_size=3, tap_layers=(0, 2), target_fingerprint=""
                )
            )
        },
        ValueError,
        "`drafter` taps layer 2, but the target's layers are -1..1",
    ),
    "options": (
        {"options": "token"},
        TypeError,
        "`options` must be a Speculation, got str",
    ),
    "draft length above the block size": (
        {"options": dspark_jax.Speculation(draft_length=BLOCK_SIZE + 1)},
        ValueError,
        "`options.draft_length` must be at most the drafter's block size 3, got 4",
    ),
    "keep without confidences": (
        lambda good: {
            "drafter": without_confidence(good["drafter"]),
            "options": dspark_jax.Speculation(keep=keep_a_float),
        },
        ValueError,
        "`options.keep` needs a drafter with a confidence head, but its "
        "confidence_kind is 'none'",
    ),
    "threshold without confidences": (
        lambda good: {
            "drafter": without_confidence(good["drafter"]),
            "confidence_threshold": 0.5,
        },
        ValueError,
        "`confidence_threshold` needs a drafter with a confidence head, but its "
        "confidence_kind is 'none'",
    ),
    "threshold of prompt lookup": (
        lambda good: {
            "drafter": dspark_jax.make_prompt_lookup(BLOCK_SIZE)[0],
            "confidence_threshold": 0.5,
        },
        ValueError,
        "`confidence_threshold` needs a drafter with a confidence head",
    ),
    "threshold": (
        {"confidence_threshold": 1.5},
        ValueError,
        "`confidence_threshold` must lie in [0, 1], got 1.5",
    ),
    "threshold nan": (
        {"confidence_threshold": float("nan")},
        ValueError,
        "`confidence_threshold` must lie in [0, 1], got nan",
    ),
    "threshold shape": (
        {"confidence_threshold": np.full((3,), 0.5, np.float32)},
        ValueError,
        "`confidence_threshold` must have shape () or (B,) = (2,), got (3,)",
    ),
    "confidence temperatures": (
        {"confidence_temperatures": [1.0, 0.0, 1.0]},
        ValueError,
        "`confidence_temperatures` must be positive and finite, got [1.0, 0.0, 1.0]",
    ),
    "confidence temperatures too few": (
        {"confidence_temperatures": [1.0]},
        ValueError,
        "`confidence_temperatures` must have one value a slot, at least (3,), got (1,)",
    ),
}


def check(function, arguments, change, error, message):
    changes = change(arguments) if callable(change) else change
    with pytest.raises(error, match=re.escape(message)):
        function(**{**arguments, **changes})


@pytest.mark.parametrize("row", [*BOTH, *SPECULATIVE])
def test_speculative_generate(row, good):
    check(dspark_jax.speculative_generate, good, *{**BOTH, **SPECULATIVE}[row])


@pytest.mark.parametrize("row", BOTH)
def test_autoregressive_generate(row, good):
    plain = {k: v for k, v in good.items() if not k.startswith("drafter")}
    check(dspark_jax.autoregressive_generate, plain, *BOTH[row])


@pytest.mark.parametrize("row", ["key raw", "tokens rank", "top_p 0", "limits dtype"])
def test_nothing_to_generate_is_checked_too(row, good):
    arguments = {**good, "max_new_tokens": 0}
    check(dspark_jax.speculative_generate, arguments, *BOTH[row])


PREFILL = {
    "capacity": (
        {"capacity": 8},
        ValueError,
        "`capacity` must be at least P + max_new_tokens = 5 + 4, got 8",
    ),
    "capacity float": (
        {"capacity": 9.0},
        TypeError,
        "`capacity` must be an int, got 9.0",
    ),
    "max_new_tokens": (
        {"max_new_tokens": 0},
        ValueError,
        "`max_new_tokens` must be at least 1, got 0",
    ),
    **{
        row: BOTH[row]
        for row in (
            "key raw",
            "lengths empty prompt",
            "limits too large",
            "num_samples",
        )
    },
    "options": SPECULATIVE["options"],
}


@pytest.mark.parametrize("row", PREFILL)
def test_prefill(row, good):
    check(dspark_jax.prefill, {**good, "capacity": 9}, *PREFILL[row])


EXTEND = {
    "state": ({"state": 3}, TypeError, "`state` must be a DecodeState, got int"),
    "tokens of another batch": (
        {"tokens": np.ones((3, 5), np.int32), "lengths": ints(1, 1, 1)},
        ValueError,
        "`tokens` must have shape (B, Q) = (2, 5), got (3, 5)",
    ),
    "tokens too many": (
        {"lengths": ints(4, 0)},
        ValueError,
        "`state` holds 12 tokens, but this turn needs 13; call `prefill` with a larger "
        "capacity",
    ),
    "lengths negative": (
        {"lengths": ints(-1, 0)},
        ValueError,
        "`lengths` must lie in 0..5, got -1",
    ),
    "max_new_tokens": (
        {"max_new_tokens": 0},
        ValueError,
        "`max_new_tokens` must be at least 1, got 0",
    ),
    "limits": BOTH["limits too large"],
    "stop_tokens": BOTH["stop_tokens too large"],
    "sampling": BOTH["top_k 0"],
    "target": BOTH["target"],
    "options": SPECULATIVE["options"],
}


@pytest.mark.parametrize("row", EXTEND)
def test_extend(row, good, state):
    arguments = {**good, "state": state, "lengths": ints(2, 0)}
    del arguments["key"]
    check(dspark_jax.extend, arguments, *EXTEND[row])


def test_extend_past_the_last_position(good, state):
    long = state.replace(
        tokens=jnp.zeros((2, 32), jnp.int32), lengths=jnp.array([15, 4], jnp.int32)
    )
    arguments = {**good, "state": long, "lengths": ints(2, 0)}
    del arguments["key"]
    message = "`tokens` must end by the target's max_position 16, got 17"
    check(dspark_jax.extend, arguments, {}, ValueError, message)


ROUND = {
    **{row: SPECULATIVE[row] for row in SPECULATIVE},
    "state": (
        {"state": None},
        TypeError,
        "`state` must be a DecodeState, got NoneType",
    ),
    "state of plain decoding": (
        lambda good: {"state": good["state"].replace(drafter_state=None, stats=None)},
        ValueError,
        "`state` was made by a `prefill` without a drafter",
    ),
    "cap": (
        {"max_verify_length": ints(-1, 2)},
        ValueError,
        "`max_verify_length` must lie in 0..2**31 - 1, got -1",
    ),
    "cap shape": (
        {"max_verify_length": 2},
        ValueError,
        "`max_verify_length` must have shape (B) = (2,), got ()",
    ),
    "cap dtype": (
        {"max_verify_length": np.ones((2,), np.float32)},
        TypeError,
        "`max_verify_length` must hold integers, got float32",
    ),
    "sampling": BOTH["temperature negative"],
    "stop_tokens": BOTH["stop_tokens negative"],
    "target": BOTH["target"],
}


@pytest.mark.parametrize("row", ROUND)
def test_speculative_round(row, good, state):
    names = ("target", "target_params", "drafter", "drafter_params")
    arguments = {"state": state, **{name: good[name] for name in names}}
    check(dspark_jax.speculative_round, arguments, *ROUND[row])


def test_autoregressive_steps(good, state):
    arguments = {"num_steps": 1, "target_params": good["target_params"]}
    with pytest.raises(TypeError, match="`target` must be a Target, got int"):
        generate.autoregressive_steps(state, target=3, **arguments)
    with pytest.raises(TypeError, match="`state` must be a DecodeState, got int"):
        generate.autoregressive_steps(3, target=good["target"], **arguments)


def test_keep_must_return_a_bool_per_request():
    models = testing.make_tiny_models()
    message = "`options.keep` must return bool (B,) = (2,), got float32 (2,)"
    with pytest.raises(ValueError, match=re.escape(message)):
        jax.eval_shape(
            lambda: dspark_jax.speculative_generate(
                jax.random.key(0),
                jnp.ones((2, 3), jnp.int32),
                jnp.ones((2,), jnp.int32),
                max_new_tokens=2,
                options=dspark_jax.Speculation(keep=keep_a_float),
                **models._asdict(),
            )
        )


@pytest.mark.parametrize(
    "name",
    [
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "no_repeat_ngram_size",
        "logit_bias",
        "bad_words",
        "allowed_tokens",
        "grammar",
        "regex",
        "json_schema",
    ],
)
def test_what_sampling_does_not_support_yet(name):
    message = (
        f"`sampling.{name}` is not supported yet: Sampling has temperature, top_k, "
        "top_p and min_p"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        Sampling(temperature=1.0, **{name: 1.1})
    with pytest.raises(TypeError, match="unexpected keyword argument 'temprature'"):
        Sampling(temprature=1.0)


def test_sampling_is_still_a_pytree():
    settings = Sampling(temperature=0.5, top_k=3).replace(top_p=0.9)
    doubled = jax.tree.map(lambda x: 2 * x, settings)
    assert doubled == Sampling(temperature=1.0, top_k=6, top_p=1.8)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        (
            {"rule": "greedy"},
            ValueError,
            "rule must be one of ('token', 'block', 'seede",
        ),
        ({"draft_length": 0}, ValueError, "draft_length must be positive, got 0"),
        ({"draft_length": 2.0}, TypeError, "draft_length must be int | None, got 2.0"),
        ({"candidates": 0}, ValueError, "candidates must be positive, got 0"),
        ({"candidates": True}, TypeError, "candidates must be int | None, got True"),
        ({"keep": 0.5}, TypeError, "keep must be a function, got 0.5"),
    ],
)
def test_speculation(fields, error, message):
    with pytest.raises(error, match=re.escape(message)):
        dspark_jax.Speculation(**fields)


BLOCK = {
    "width": 8,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_width": 4,
    "ffn_width": 12,
}
DECODER = {"vocab_size": 19, "num_layers": 2, "max_position": 64, "block": BLOCK}
DRAFTER = {
    **DECODER,
    "block_size": 3,
    "mask_token": 1,
    "tap_layers": (0, 1),
    "num_target_layers": 2,
    "markov_rank": 4,
}


def built(fields):
    return {**fields, "block": BlockConfig(**fields["block"])}


CONFIGS = [
    (
        RopeConfig,
        {"kind": "yarn"},
        ValueError,
        "rope.kind must be one of ('default', 'l",
    ),
    (RopeConfig, {"theta": 0.0}, ValueError, "rope.theta must be positive, got 0.0"),
    (RopeConfig, {"theta": "1e4"}, TypeError, "theta must be float, got '1e4'"),
    (
        RopeConfig,
        {"factor": float("nan")},
        ValueError,
        "rope.factor must be positive, got nan",
    ),
    (
        RopeConfig,
        {"kind": "llama3", "low_freq_factor": 4.0},
        ValueError,
        "rope.low_freq_factor must be below rope.high_freq_factor, got 4.0 and 4.0",
    ),
    (
        RopeConfig,
        {"original_max_position": 0},
        ValueError,
        "rope.original_max_position must be positive, got 0",
    ),
    (BlockConfig, {"width": 0}, ValueError, "width must be positive, got 0"),
    (BlockConfig, {"num_heads": 2.0}, TypeError, "num_heads must be int, got 2.0"),
    (
        BlockConfig,
        {"num_kv_heads": 3},
        ValueError,
        "num_heads must be a multiple of num_kv_heads, got 2 and 3",
    ),
    (BlockConfig, {"head_width": 3}, ValueError, "head_width must be even, got 3"),
    (BlockConfig, {"qk_norm": 1}, TypeError, "qk_norm must be bool, got 1"),
    (BlockConfig, {"rope": {}}, TypeError, "rope must be RopeConfig, got {}"),
    (
        DecoderConfig,
        {"vocab_size": "19"},
        TypeError,
        "vocab_size must be int, got '19'",
    ),
    (
        DecoderConfig,
        {"num_layers": 0},
        ValueError,
        "num_layers must be positive, got 0",
    ),
    (
        DecoderConfig,
        {"stop_tokens": [2]},
        TypeError,
        "stop_tokens must be tuple[int, ...], got [2]",
    ),
    (
        DecoderConfig,
        {"stop_tokens": (19,)},
        ValueError,
        f"stop_tokens must lie in {VOCABULARY}, got 19",
    ),
    (
        DecoderConfig,
        {"compute_dtype": "float8"},
        ValueError,
        "compute_dtype must be one of ('float32', 'bfloat16', 'float16'), got 'float8'",
    ),
    (DecoderConfig, {"block": BLOCK}, TypeError, "block must be BlockConfig, got {"),
    (
        DecoderConfig,
        {"fingerprint": None},
        TypeError,
        "fingerprint must be str, got None",
    ),
    (
        DrafterConfig,
        {"mask_token": 19},
        ValueError,
        f"mask_token must lie in {VOCABULARY}, got 19",
    ),
    (
        DrafterConfig,
        {"mask_token": -1},
        ValueError,
        f"mask_token must lie in {VOCABULARY}, got -1",
    ),
    (
        DrafterConfig,
        {"block_size": 0},
        ValueError,
        "block_size must be positive, got 0",
    ),
    (
        DrafterConfig,
        {"markov_kind": "lstm"},
        ValueError,
        "markov_kind must be one of ('none', 'vanilla', 'gated', 'rnn'), got 'lstm'",
    ),
    (
        DrafterConfig,
        {"confidence_kind": "deep"},
        ValueError,
        "confidence_kind must be one of ('none', 'plain', 'markov'), got 'deep'",
    ),
    (
        DrafterConfig,
        {"markov_kind": "none", "confidence_kind": "plain"},
        ValueError,
        "markov_rank must be 0 when markov_kind is 'none', got 4",
    ),
    (
        DrafterConfig,
        {"markov_kind": "none", "markov_rank": 0},
        ValueError,
        "confidence_kind 'markov' needs a Markov head, but markov_kind is 'none'",
    ),
    (
        DrafterConfig,
        {"markov_rank": 0},
        ValueError,
        "markov_rank must be positive, got 0",
    ),
    (
        DrafterConfig,
        {"tap_layers": ()},
        ValueError,
        "tap_layers must name at least one target layer, got ()",
    ),
    (
        DrafterConfig,
        {"tap_layers": (1, 0)},
        ValueError,
        "tap_layers must be strictly increasing, got (1, 0)",
    ),
    (
        DrafterConfig,
        {"tap_layers": (0, 2)},
        ValueError,
        "tap_layers must lie in -1..1, got (0, 2)",
    ),
    (
        DrafterConfig,
        {"tap_layers": [0, 1]},
        TypeError,
        "tap_layers must be tuple[int, ...], got [0, 1]",
    ),
]


@pytest.mark.parametrize(("kind", "fields", "error", "message"), CONFIGS)
def test_configurations(kind, fields, error, message):
    base = {
        RopeConfig: {},
        BlockConfig: BLOCK,
        DecoderConfig: built(DECODER),
        DrafterConfig: built(DRAFTER),
    }[kind]
    kind(**base)
    with pytest.raises(error, match=re.escape(message)):
        kind(**{**base, **fields})


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        (
            {"vocab": 19},
            ValueError,
            "unknown key 'vocab'; known keys: block, block_size, compute_dtype,",
        ),
        (
            {"block": {**BLOCK, "rope": {"base": 1.0}}},
            ValueError,
            "unknown key 'block.rope.base'; known keys: factor, high_freq_factor, ki",
        ),
        (
            {"block": {"width": 8}},
            ValueError,
            "missing key 'block.ffn_width'",
        ),
        ({"block": 3}, TypeError, "block must be a table, got int"),
        ({"block_size": "7"}, TypeError, "block_size must be int, got '7'"),
        ({"block_size": 7.0}, TypeError, "block_size must be int, got 7.0"),
        ({"block_size": True}, TypeError, "block_size must be int, got True"),
        ({"tap_layers": 1}, TypeError, "tap_layers must be a list, got int"),
        ({"tap_layers": [0, "1"]}, TypeError, "tap_layers must be int, got '1'"),
        (
            {"markov_kind": "lstm"},
            ValueError,
            "markov_kind must be one of ('none', 'vanilla', 'gated', 'rnn'), got",
        ),
    ],
)
def test_from_dict(values, error, message):
    config_lib.from_dict(DrafterConfig, DRAFTER)
    with pytest.raises(error, match=re.escape(message)):
        config_lib.from_dict(DrafterConfig, {**DRAFTER, **values})


def test_load_toml(tmp_path):
    path = tmp_path / "drafter.toml"
    path.write_text("theta = 1e5\nkind = 'linear'\nfactor = 2\n")
    assert config_lib.load_toml(path, RopeConfig) == RopeConfig(
        theta=1e5, kind="linear", factor=2.0
    )
    path.write_text("theta = 1e5\nscale = 2\n")
    with pytest.raises(ValueError, match="unknown key 'scale'; known keys: factor, "):
        config_lib.load_toml(path, RopeConfig)
    path.write_text("theta = \n")
    with pytest.raises(ValueError, match=re.escape(f"{path} is not valid TOML: ")):
        config_lib.load_toml(path, RopeConfig)
    with pytest.raises(FileNotFoundError):
        config_lib.load_toml(tmp_path / "none.toml", RopeConfig)
