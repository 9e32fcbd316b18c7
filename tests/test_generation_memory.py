"""The memory that a generation takes: one cache, and one that is written in place.

A cache of 4104 positions, beside which everything else is small; nothing is run.
"""

import jax
import numpy as np
import pytest

import dspark_jax
from dspark_jax import testing
from dspark_jax.config import BlockConfig, DecoderConfig, DrafterConfig
from dspark_jax.drafters import dspark
from dspark_jax.targets import decoder


@pytest.fixture(scope="module")
def wide():
    """Shapes only: nothing of these models is ever run."""
    block = BlockConfig(
        width=8, num_heads=1, num_kv_heads=1, head_width=64, ffn_width=8
    )
    fields = {"vocab_size": 19, "max_position": 8192, "block": block}
    config = DecoderConfig(num_layers=2, **fields)
    drafter_config = DrafterConfig(
        num_layers=1,
        block_size=2,
        mask_token=1,
        tap_layers=(0, 1),
        num_target_layers=2,
        markov_rank=4,
        **fields,
    )
    target = decoder.make_target(config)
    return testing.TinyModels(
        target=target,
        target_params=decoder.abstract(config),
        drafter=dspark.make_drafter(drafter_config, target),
        drafter_params=dspark.abstract(drafter_config),
    )


def cache_bytes(models, capacity):
    def make():
        return (
            models.target.init_cache(1, capacity),
            models.drafter.init_state(1, capacity),
        )

    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(jax.eval_shape(make)))


def test_a_generation_holds_one_cache(wide):
    compiled = (
        jax.jit(
            lambda key, tokens, lengths, target_params, drafter_params: (
                dspark_jax.speculative_generate(
                    key,
                    tokens,
                    lengths,
                    target=wide.target,
                    target_params=target_params,
                    drafter=wide.drafter,
                    drafter_params=drafter_params,
                    max_new_tokens=4096,
                )
            )
        )
        .lower(
            jax.random.key(0),
            np.ones((1, 8), np.int32),
            np.ones((1,), np.int32),
            wide.target_params,
            wide.drafter_params,
        )
        .compile()
    )
    memory = compiled.memory_analysis()
    held = memory.temp_size_in_bytes + memory.output_size_in_bytes
    one = cache_bytes(wide, 4104)
    assert one <= held < 1.5 * one


def test_rounds_update_a_donated_state_in_place(wide):
    state = jax.eval_shape(
        lambda key, tokens, lengths, target_params, drafter_params: dspark_jax.prefill(
            key,
            tokens,
            lengths,
            max_new_tokens=4096,
            capacity=4104,
            target=wide.target,
            target_params=target_params,
            drafter=wide.drafter,
            drafter_params=drafter_params,
        ),
        jax.random.key(0),
        np.ones((1, 8), np.int32),
        np.ones((1,), np.int32),
        wide.target_params,
        wide.drafter_params,
    )

    def stream(state, target_params, drafter_params):
        return dspark_jax.speculative_rounds(
            state,
            2,
            target=wide.target,
            target_params=target_params,
            drafter=wide.drafter,
            drafter_params=drafter_params,
        )

    memory = (
        jax.jit(stream, donate_argnames="state")
        .lower(state, wide.target_params, wide.drafter_params)
        .compile()
        .memory_analysis()
    )
    one = cache_bytes(wide, 4104)
    assert memory.alias_size_in_bytes >= one
    assert memory.temp_size_in_bytes < 0.5 * one
