"""Good arguments to change, and the check that a change is refused with its message.

A row of the tables beside this file is (change, error, message); the change is a dict,
or makes one of the good arguments. The target here raises if anything of it is called.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import testing
from dspark_jax.types import DecodeState, Stats

VOCAB, MAX_POSITION, BLOCK_SIZE = 19, 16, 3


def make_good():
    """Good arguments, which the rows change."""
    made = testing.make_tiny_models(
        vocab_size=VOCAB,
        block_size=BLOCK_SIZE,
        target_fields={"max_position": MAX_POSITION, "fingerprint": "mine"},
    )
    target = made.target._replace(
        forward=work, init_cache=work, unembed=work, embed=work
    )
    drafter = made.drafter._replace(init_state=work, observe=work, propose=work)
    return {
        "key": jax.random.key(0),
        "tokens": np.full((2, 5), 7, np.int32),
        "lengths": np.array([5, 3], np.int32),
        "target": target,
        "target_params": made.target_params,
        "drafter": drafter,
        "drafter_params": made.drafter_params,
        "max_new_tokens": 4,
    }


def make_state():
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


def check(function, arguments, change, error, message):
    changes = change(arguments) if callable(change) else change
    with pytest.raises(error, match=re.escape(message)):
        function(**{**arguments, **changes})


def ints(*values):
    return np.array(values, np.int32)


def work(*args, **kwargs):
    raise AssertionError("work was done before the argument was checked")
