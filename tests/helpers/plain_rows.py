"""Four prompts for a fitted golden drafter and its target, and plain decoding's words.

Drafts of it are accepted and refused. Rows have their own keys and settings.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import dspark_jax
from dspark_jax.drafters.load import load_drafter
from dspark_jax.sampling import Sampling
from dspark_jax.targets.load import load_target

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


@functools.cache
def load_models(golden):
    target, target_params = load_target(golden / "targets" / "qwen3_untied")
    folder = golden / "cases" / "dspark_vanilla_b4" / "drafter"
    drafter, drafter_params = load_drafter(folder, target)
    return {
        "target": target,
        "target_params": target_params,
        "drafter": drafter,
        "drafter_params": drafter_params,
    }


@functools.cache
def generate(golden):
    """Plain decoding of all rows, with log-probabilities."""
    models = load_models(golden)

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


def words(generation, row):
    """The new tokens of one row of the common prompts."""
    return np.asarray(generation.tokens[row, LENGTHS[row] : generation.lengths[row]])


def check_words(generation, plain, counts=(NEW,) * B):
    for row, count in enumerate(counts):
        np.testing.assert_array_equal(words(generation, row), words(plain, row)[:count])


def prompts():
    padding = np.random.default_rng(0).integers(V, size=(B, P)).astype(np.int32)
    for row, prompt in enumerate(PROMPTS):
        padding[row, : len(prompt)] = prompt
    return padding


def keys():
    return jax.random.split(jax.random.key(1), B)


def settings(rows=slice(None)):
    return Sampling(**{name: jnp.asarray(v[rows]) for name, v in SAMPLING.items()})
