"""All blocks of a sequence in one attention equal block by block."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import layers
from dspark_jax.training import anchor_attention

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.mark.parametrize(("slots", "context"), [(3, 7), (4, 6), (5, 9)])
@pytest.mark.parametrize("several_sizes", [False, True])
def test_by_anchor_equals_grouped(slots, context, several_sizes):
    batch, anchors, heads, groups, width = 2, 3, 4, 2, 8
    keys = iter(jax.random.split(jax.random.key(0), 9))

    def draw(*shape):
        return jax.random.normal(next(keys), shape, jnp.float32)

    query = draw(batch, anchors, slots, heads, width)
    shared = [draw(batch, groups, context, width) for _ in range(2)]
    own = [draw(batch, anchors, slots, groups, width) for _ in range(2)]
    starts = jax.random.randint(next(keys), (batch, anchors), 0, context)
    index = jnp.arange(context, dtype=jnp.int32)
    visible = (index[None, None] < starts[..., None])[:, :, None]
    in_block = None
    if several_sizes:
        sizes = jax.random.randint(next(keys), (batch, anchors), 1, slots + 1)
        index = jnp.arange(slots, dtype=jnp.int32)
        in_block = (index[None, None] < sizes[..., None])[:, :, None]
    segments = [(*shared, visible), (*own, in_block)]

    def by_anchor(query, segments):
        with jax.default_matmul_precision("highest"):  # a GPU would use TF32
            return anchor_attention.by_anchor(query, segments, "xla")

    expected = jax.jit(layers.grouped_attention)(query, segments)
    found = jax.jit(by_anchor)(query, segments)
    np.testing.assert_allclose(found, expected, atol=1e-6)

    def loss(function):
        def run(query, shared, own):
            segments = [(*shared, visible), (*own, in_block)]
            return jnp.sum(jnp.sin(function(query, segments)))

        return jax.jit(jax.grad(run, argnums=(0, 1, 2)))(query, shared, own)

    ours = loss(by_anchor)
    theirs = loss(layers.grouped_attention)
    for mine, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(mine, other, atol=2e-6)
