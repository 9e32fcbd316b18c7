"""Strict switches for every test: dtype and rank promotion, eight devices, fixed seeds.

Everything here is set before the first array exists.
"""

import os
import pathlib

# Two workers share one card: neither may reserve most of it.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import hypothesis
import jax
import numpy as np
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_num_cpu_devices", 8)  # changes nothing on a GPU

# The same examples in every run; compilation makes the first one slow.
hypothesis.settings.register_profile("fixed", derandomize=True, deadline=None)
hypothesis.settings.load_profile("fixed")


def pytest_collection_modifyitems(items):
    if all(item.get_closest_marker("gpu") is None for item in items):
        return
    if jax.default_backend() == "gpu":
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU")
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _fixed_numpy_seed():
    np.random.seed(0)  # noqa: NPY002 (for libraries that draw from the global one)


@pytest.fixture(scope="session")
def golden() -> pathlib.Path:
    """The folder of golden vectors; its README says what is in it."""
    return pathlib.Path(__file__).parent / "golden"


@pytest.fixture(scope="session")
def root() -> pathlib.Path:
    """The folder that holds tests/: the checkout, or a copy elsewhere."""
    return pathlib.Path(__file__).parent.parent
