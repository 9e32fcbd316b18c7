"""Eight rows generated in one call, with everything that a row may have of its own.

Rows are independent and noise belongs to a row's key: however the call is transformed,
a row's words are the same.
"""

import functools

import jax
import numpy as np

import dspark_jax
from dspark_jax import testing

ROWS, NEW = 8, 9
PROMPTS = np.array([[3, 1, 4, 1, 5], [9, 2, 6, 0, 0]], np.int32)
TOKENS = np.repeat(PROMPTS, 4, axis=0)
LENGTHS = np.repeat(np.array([5, 3], np.int32), 4)
LIMITS = np.array([9, 9, 4, 1, 9, 0, 9, 7], np.int32)
TEMPERATURE = np.array([1, 0, 0.7, 1, 0.2, 1, 1, 3], np.float32)
STOPS = np.array([2, 11], np.int32)


@functools.cache
def make_models():
    return testing.make_tiny_models(block_size=2)


def make_keys():
    return jax.random.split(jax.random.key(1), ROWS)


def rollout(
    key,
    tokens,
    lengths,
    limits,
    temperature,
    target_params,
    drafter_params,
    *,
    models,
    rule="token",
    **options,
):
    return dspark_jax.speculative_generate(
        key,
        tokens,
        lengths,
        target=models.target,
        target_params=target_params,
        drafter=models.drafter,
        drafter_params=drafter_params,
        max_new_tokens=NEW,
        limits=limits,
        sampling=dspark_jax.Sampling(temperature=temperature),
        options=dspark_jax.Speculation(rule=rule),
        **{"stop_tokens": STOPS, "confidence_threshold": 0.3, **options},
    )


def arrays(models, keys):
    return (
        keys,
        TOKENS,
        LENGTHS,
        LIMITS,
        TEMPERATURE,
        models.target_params,
        models.drafter_params,
    )
