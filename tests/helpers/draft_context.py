"""What the drafter has seen of a serving engine's requests, against what it must have.

The reference knows no rounds: all known tokens go through the target at once, and the
drafter observes all of them at once.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np


def check(engine):
    """Raises AssertionError unless every context is right; returns tokens looked at.

    Steps under way are read first. Of a request's last tokens those that plain rounds
    fed, and no catch-up has shown yet, are left out.
    """
    loop = engine._loop
    loop._collect(loop.step_number)
    pool = loop.runner._state.draft_pool
    keys, values = jax.device_get((pool.keys, pool.values))
    num_checked = 0
    for request in loop.slots.decoding:
        known = request._known
        end = len(known) - 1 - request._num_deferred  # the anchor was not fed yet
        wanted = _reference(engine, known)
        for stored, right in zip((*keys, *values), wanted, strict=True):
            found = np.concatenate(stored[request._pages], axis=1)  # [G, C, E]
            np.testing.assert_allclose(
                found[:, :end], right[0, :, :end], rtol=1e-4, atol=1e-5
            )
        num_checked += end
    return num_checked


def catch_up_all(engine):
    """Shows the drafter all that waits now."""
    loop = engine._loop
    loop._collect(loop.step_number)
    for of_call in loop._upkeep.due(loop.slots.decoding, is_drafting=True):
        loop._catch_up(of_call)


def _reference(engine, known):
    runner = engine._loop.runner
    tokens = np.zeros((1, engine.config.max_length), np.int32)
    tokens[0, : len(known)] = known
    keys_values = _context_of(runner.spec.target, runner.spec.drafter)
    params = runner._params
    return jax.device_get(
        keys_values(params.target, params.drafter, tokens, np.int32(len(known)))
    )


@functools.cache
def _context_of(target, drafter):
    def keys_values(target_params, drafter_params, tokens, length):
        capacity = tokens.shape[1]
        index = jnp.arange(capacity, dtype=jnp.int32)[None]
        positions = jnp.where(index < length, index, -1)
        _, taps, _ = target.forward(
            target_params,
            tokens,
            positions,
            target.init_cache(1, capacity),
            tap_layers=drafter.config.tap_layers,
        )
        state = drafter.init_state(1, capacity)
        state = drafter.observe(drafter_params, state, tokens, positions, taps)
        return (*state.keys, *state.values)

    return jax.jit(keys_values)
