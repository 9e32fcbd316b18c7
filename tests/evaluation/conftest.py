"""Tiny models and prompts that the evaluation tests share."""

import jax
import numpy as np
import pytest

from dspark_jax import testing


@pytest.fixture(scope="session")
def models():
    # Mild logits, so that drafts are accepted often and stop tokens come up.
    return testing.make_tiny_models(block_size=4, scale=0.3)


@pytest.fixture(scope="session")
def prompts():
    random = np.random.default_rng(0)
    sizes = (5, 2, 7, 3, 4, 6, 2)
    return [random.integers(0, 19, size).tolist() for size in sizes]


@pytest.fixture(scope="session")
def keys(prompts):
    return jax.random.split(jax.random.key(3), len(prompts))
