"""What a compiled training step holds: never the logits of a whole batch."""

import math
import re

import jax
import jax.numpy as jnp
import pytest

from dspark_jax.config import BlockConfig, DecoderConfig, DrafterConfig
from dspark_jax.targets import decoder
from dspark_jax.training import settings, step, target_states

ROWS, LENGTH, ANCHORS, BLOCK, WIDTH = 2, 48, 32, 4, 16


def compile_step(vocab_size, chunk_logits):
    block = BlockConfig(
        width=WIDTH, num_heads=2, num_kv_heads=1, head_width=8, ffn_width=16
    )
    config = DecoderConfig(
        vocab_size=vocab_size, num_layers=2, block=block, max_position=64
    )
    drafter = DrafterConfig(
        vocab_size=vocab_size,
        num_layers=1,
        block=block,
        max_position=64,
        block_size=BLOCK,
        mask_token=1,
        tap_layers=(0, 1),
        num_target_layers=2,
        markov_kind="vanilla",
        markov_rank=2,
        confidence_kind="markov",
    )
    target = decoder.make_target(config)
    train = settings.TrainConfig(num_anchors=ANCHORS, chunk_logits=chunk_logits)

    def run(key, batch):
        params = decoder.init(key, config)
        state = step.init_state((step.init_params(key, drafter),), train)
        return state, params, batch

    batch = target_states.Batch(
        tokens=jnp.zeros((ROWS, LENGTH), jnp.int32),
        loss_mask=jnp.ones((ROWS, LENGTH), jnp.bool_),
    )
    state, params, batch = jax.eval_shape(run, jax.random.key(0), batch)

    def one(state, batch, params, key, rate):
        return step.train_step(
            key,
            state,
            batch,
            params,
            rate,
            target=target,
            drafters=(drafter,),
            config=train,
        )

    key = jax.eval_shape(lambda: jax.random.key(0))
    rate = jax.ShapeDtypeStruct((), jnp.float32)
    jitted = jax.jit(one, donate_argnames=("state",))
    return jitted.lower(state, batch, params, key, rate).compile()


def largest_array(compiled):
    """Elements of the largest float32 array in the compiled program."""
    shapes = re.findall(r"f32\[([\d,]+)\]", compiled.as_text())
    return max(math.prod(map(int, shape.split(","))) for shape in shapes)


@pytest.fixture(scope="module", name="programs")
def _programs():
    chunk = 2**16
    return {v: compile_step(v, chunk) for v in (4096, 8192)}, chunk


def test_no_array_holds_the_logits_of_a_batch(programs):
    compiled, chunk = programs
    for vocab_size, program in compiled.items():
        whole = ROWS * ANCHORS * BLOCK * vocab_size
        assert chunk < whole
        # The next largest things are the matrices [V, D + R].
        assert largest_array(program) <= max(chunk, vocab_size * (WIDTH + 2))


def test_memory_is_flat_as_the_vocabulary_doubles(programs):
    compiled, _ = programs
    small, large = (compiled[v].memory_analysis() for v in (4096, 8192))
    growth = large.temp_size_in_bytes - small.temp_size_in_bytes
    # What grows is [V, D + R]: the matrix of the products, its gradient, optimiser.
    matrices = 4 * (8192 - 4096) * (WIDTH + 2)
    assert growth <= 4 * matrices
    # Whole logits would have grown by this.
    assert growth < 4 * ROWS * ANCHORS * BLOCK * (8192 - 4096) / 2


def test_chunks_bound_memory():
    whole = compile_step(4096, 2**30)
    assert largest_array(whole) >= ROWS * ANCHORS * BLOCK * 4096
