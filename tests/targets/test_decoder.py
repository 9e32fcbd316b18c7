"""The decoder's own promises, besides the laws that `check_target` checks."""

import jax.numpy as jnp
import numpy as np

from dspark_jax import testing


def test_rows_beyond_the_vocabulary_are_never_logits():
    """Tables may be padded, for a mesh say; the true vocabulary is the config's."""
    target, params, _, _ = testing.make_tiny_models()
    padded = params.replace(embed=jnp.pad(params.embed, ((0, 5), (0, 0))))
    hidden = jnp.asarray(np.random.default_rng(0).normal(size=(2, 8)), jnp.float32)
    got = target.unembed(padded, hidden)
    assert got.shape == (2, target.config.vocab_size)
    np.testing.assert_allclose(got, target.unembed(params, hidden), rtol=1e-6)
