"""The N best by blocks are those of `jax.lax.top_k`, order of ties included."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import candidates

CASES = ((40, 3), (700, 16), (4096, 8), (5001, 3), (5000, 1), (33, 33), (9000, 64))


@pytest.mark.parametrize(("size", "num"), CASES)
@pytest.mark.parametrize("kind", ["distinct", "ties", "equal", "few", "sorted"])
def test_blocks_find_what_a_sort_finds(size, num, kind):
    rng = np.random.default_rng(size + num)
    logits = rng.normal(size=(2, 3, size)).astype(np.float32)
    if kind == "ties":
        logits = np.round(2 * logits) / 2
        logits[logits == 0] = rng.choice([0.0, -0.0], size=(logits == 0).sum())
    if kind == "equal":
        logits = np.zeros_like(logits)
    if kind == "few":
        logits = np.where(rng.random(logits.shape) < 0.5 * num / size, logits, -np.inf)
    if kind == "sorted":
        logits = np.sort(logits)  # the best lie in few blocks, at the end
    found = jax.jit(candidates.by_blocks, static_argnums=1)(jnp.asarray(logits), num)
    # A stable sort in the total order (0.0 before -0.0); equal ones in order of ids.
    index = np.lexsort((np.signbit(logits), -logits), axis=-1)[..., :num]
    np.testing.assert_array_equal(found[1], index)
    np.testing.assert_array_equal(found[0], np.take_along_axis(logits, index, -1))


def test_what_is_not_finite_gives_valid_indices():
    logits = np.random.default_rng(0).normal(size=(3, 3000)).astype(np.float32)
    logits[0, 1234] = np.nan
    logits[1, 77] = np.inf
    logits[2] = np.nan
    values, index = candidates.by_blocks(jnp.asarray(logits), 4)
    assert index[0, 0] == 1234
    assert np.isnan(values[0, 0])
    assert index[1, 0] == 77
    assert ((index >= 0) & (index < 3000)).all()


def test_a_cpu_sorts():
    logits = jax.random.normal(jax.random.key(0), (5, 3000))
    for ours, theirs in zip(
        candidates.best(logits, 9), jax.lax.top_k(logits, 9), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)
