"""The target's pass over whole rows, and the scale of its taps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.drafters import backbone
from dspark_jax.training import step, target_states


def test_the_target_pass_equals_one_with_a_cache(small):
    target, params, _, batch = small
    states = target_states.compute(target, params, batch, (0, 2))
    positions = jnp.broadcast_to(jnp.arange(20, dtype=jnp.int32)[None], (8, 20))
    hidden, taps, _ = target.forward(
        params, batch.tokens, positions, target.init_cache(8, 20), tap_layers=(0, 2)
    )
    np.testing.assert_allclose(states.hidden, hidden, atol=1e-5)
    np.testing.assert_allclose(states.taps, taps, atol=1e-5)


def test_folding_the_tap_scale_changes_nothing(small):
    target, params, drafters, batch = small
    states = target_states.compute(target, params, batch, (0, 2))
    scale = target_states.measure_tap_scale(states, 2)
    assert all(np.log2(x) == round(np.log2(x)) for x in scale)
    scaled = target_states.scale_taps(states.taps, scale)[:, 1:]
    rms = np.sqrt(np.mean(np.square(scaled).reshape(8, 19, 2, 16), axis=(0, 1, 3)))
    assert np.all((rms > 0.7) & (rms < 1.42))
    drafter = step.init_params(jax.random.key(0), drafters[0])
    raw = target_states.fold_tap_scale(drafter, scale).backbone
    np.testing.assert_allclose(
        backbone.context_features(raw, drafters[0], states.taps),
        backbone.context_features(
            drafter.backbone, drafters[0], target_states.scale_taps(states.taps, scale)
        ),
        atol=1e-6,
    )


def test_a_scale_has_one_factor_a_layer():
    with pytest.raises(ValueError, match="one factor a tapped layer, got 3 for 32"):
        target_states.scale_taps(jnp.ones((2, 32)), (1.0, 1.0, 1.0))
