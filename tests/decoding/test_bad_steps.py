"""Bad arguments and states of prefill, extend and single rounds."""

import bad_arguments
import jax.numpy as jnp
import numpy as np
import pytest
from bad_prompts import BOTH
from bad_speculation import SPECULATIVE

import dspark_jax

check, ints = bad_arguments.check, bad_arguments.ints


@pytest.fixture(scope="module")
def good():
    return bad_arguments.make_good()


@pytest.fixture
def state():
    return bad_arguments.make_state()


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
        dspark_jax.autoregressive_steps(state, target=3, **arguments)
    with pytest.raises(TypeError, match="`state` must be a DecodeState, got int"):
        dspark_jax.autoregressive_steps(3, target=good["target"], **arguments)
