"""Bad arguments of whole generations: no work is done before they are refused."""

import re

import bad_arguments
import jax
import jax.numpy as jnp
import pytest
from bad_prompts import BOTH
from bad_speculation import SPECULATIVE, keep_a_float

import dspark_jax
from dspark_jax import testing

check = bad_arguments.check


@pytest.fixture(scope="module")
def good():
    return bad_arguments.make_good()


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
