"""Anchors and blocks: DeepSpec's conventions, and the law of the draw."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from dspark_jax.training import anchors

CASES = ("dspark_vanilla_b7", "dspark_vanilla_b7_tied", "dspark_rnn_b4")


@pytest.mark.parametrize("case", CASES)
def test_blocks_are_those_of_deepspec(golden, case):
    found = safetensors.numpy.load_file(golden / "cases" / case / "train.safetensors")
    tokens = jnp.asarray(found["in.input_ids"])
    mask = jnp.asarray(found["in.loss_mask"]) > 0
    keep = found["in.block_keep_mask"] > 0
    given = anchors.Anchors(
        positions=jnp.asarray(found["in.anchor_positions"]), keep=jnp.asarray(keep)
    )
    num_anchors, block_size = found["out.target_ids"].shape[1:]
    blocks = anchors.make_blocks(
        tokens, mask, given, block_size=block_size, mask_token=127
    )
    length = tokens.shape[1]
    np.testing.assert_array_equal(
        anchors.candidates(mask), found["mid.anchor_candidate_mask"] > 0
    )
    np.testing.assert_array_equal(
        blocks.inputs.reshape(2, -1), found["mid.noise_input_ids"]
    )
    np.testing.assert_array_equal(blocks.is_supervised, found["out.eval_mask"] > 0)
    for ours, theirs in (
        (blocks.labels, found["out.target_ids"]),
        (blocks.previous, found["mid.prev_token_ids"]),
        (
            blocks.positions,
            found["mid.position_ids"][:, length:].reshape(blocks.positions.shape),
        ),
    ):
        np.testing.assert_array_equal(np.asarray(ours)[keep], theirs[keep])
    seen = found["mid.attention_mask"].reshape(2, num_anchors, block_size, -1)
    context = np.asarray(anchors.visible(given, length))[:, :, None]
    for row in range(2):
        for block in np.flatnonzero(keep[row]):
            expected = np.zeros(seen.shape[-1], bool)
            expected[:length] = context[row, block]
            own = length + block * block_size
            expected[own : own + block_size] = True
            np.testing.assert_array_equal(
                seen[row, block] > 0, expected[None].repeat(block_size, axis=0)
            )


def test_sample_is_sorted_distinct_and_allowed():
    mask = jnp.asarray(np.random.default_rng(0).random((5, 40)) < 0.7)
    found = anchors.sample(jax.random.key(0), mask, 12)
    allowed = np.asarray(anchors.candidates(mask))
    for row in range(5):
        kept = np.asarray(found.positions[row])[np.asarray(found.keep[row])]
        assert len(kept) == min(12, allowed[row].sum())
        assert np.all(np.diff(kept) > 0)
        assert np.all(allowed[row, kept])


def test_sample_fills_up_with_dummies():
    mask = jnp.asarray([[False, True, True, False, True]])
    found = anchors.sample(jax.random.key(0), mask, 6)
    np.testing.assert_array_equal(found.positions, [[1, 0, 0, 0, 0, 0]])
    np.testing.assert_array_equal(found.keep, [[True] + 5 * [False]])


def test_sample_is_uniform():
    mask = jnp.ones((4000, 9), jnp.bool_).at[:, 3].set(False)
    found = anchors.sample(jax.random.key(1), mask, 2)
    counts = np.bincount(np.asarray(found.positions).ravel(), minlength=8)
    assert counts[[2, 3]].sum() == 0
    # Each of the 6 candidates is in a row with probability 1/3; five sigma.
    expected, sigma = 4000 / 3, np.sqrt(4000 * 2 / 9)
    assert np.all(np.abs(counts[[0, 1, 4, 5, 6, 7]] - expected) < 5 * sigma)


def test_a_gap_in_the_mask_ends_the_block():
    tokens = jnp.arange(10, dtype=jnp.int32)[None]
    mask = jnp.ones((1, 10), jnp.bool_).at[0, 4].set(False)
    given = anchors.Anchors(
        positions=jnp.asarray([[1, 7, 0]]), keep=jnp.asarray([[True, True, False]])
    )
    blocks = anchors.make_blocks(tokens, mask, given, block_size=4, mask_token=99)
    np.testing.assert_array_equal(
        blocks.is_supervised,
        [[[True, True, False, False], [True, True, False, False], [False] * 4]],
    )
    np.testing.assert_array_equal(blocks.inputs[0, :, 0], [1, 7, 99])


def test_mask_must_be_boolean():
    with pytest.raises(TypeError, match="`loss_mask` must hold booleans, got int32"):
        anchors.sample(jax.random.key(0), jnp.ones((1, 4), jnp.int32), 2)
