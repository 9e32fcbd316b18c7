"""The decoder's own promises, besides the laws that `check_target` checks."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax import layers, testing
from dspark_jax.targets import decoder


def test_rows_beyond_the_vocabulary_are_never_logits():
    """Tables may be padded, for a mesh say; the true vocabulary is the config's."""
    target, params, _, _ = testing.make_tiny_models()
    padded = params.replace(embed=jnp.pad(params.embed, ((0, 5), (0, 0))))
    hidden = jnp.asarray(np.random.default_rng(0).normal(size=(2, 8)), jnp.float32)
    got = target.unembed(padded, hidden)
    assert got.shape == (2, target.config.vocab_size)
    np.testing.assert_allclose(got, target.unembed(params, hidden), rtol=1e-6)


def test_the_residual_stream_is_float32_in_bfloat16(monkeypatch):
    """In bfloat16 its rounding was most of what one row and a window differ by."""
    config = testing.make_tiny_models()[0].config
    config = dataclasses.replace(
        config, param_dtype="bfloat16", compute_dtype="bfloat16"
    )
    target, streams = decoder.make_target(config), []
    block = layers.block

    def watched(params, block_config, x, *arguments):
        out, aux = block(params, block_config, x, *arguments)
        streams.extend([x.dtype, out.dtype])
        return out, aux

    monkeypatch.setattr(layers, "block", watched)
    tokens = jnp.zeros((1, 3), jnp.int32)
    hidden, taps, _ = jax.eval_shape(
        lambda params: target.forward(
            params, tokens, tokens, target.init_cache(1, 8), tap_layers=(0,)
        ),
        decoder.abstract(config),
    )
    assert set(streams) == {jnp.dtype("float32")}
    assert len(streams) == 2 * config.num_layers
    assert hidden.dtype == taps.dtype == jnp.bfloat16
