"""`anchor_attention`: every block alone, gradients, chunks and memory."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.anchor_attention import (
    anchor_attention,
    joined,
    reference,
    tuning,
)

pytestmark = pytest.mark.usefixtures("quick_compilation")


def draw(seed=0, batch=2, anchors=5, slots=3, length=11, heads=4, groups=2, width=8):
    """Arguments and, apart, what is not differentiated."""
    random = np.random.default_rng(seed)

    def normal(*shape):
        return jnp.asarray(random.standard_normal(shape), jnp.float32)

    arrays = {
        "query": normal(batch, anchors, slots, heads, width),
        "keys": normal(batch, groups, length, width),
        "values": normal(batch, groups, length, width),
        "own_keys": normal(batch, anchors, slots, groups, width),
        "own_values": normal(batch, anchors, slots, groups, width),
    }
    sizes = random.integers(1, slots + 1, (batch, anchors, 1))
    masks = {
        "num_context": jnp.asarray(
            np.sort(random.integers(0, length + 1, (batch, anchors))), jnp.int32
        ),
        "present": jnp.asarray(np.arange(slots)[None, None] < sizes),
        "kept": jnp.asarray(random.random((batch, anchors)) < 0.7),
    }
    return arrays, masks


def block_by_block(query, keys, values, own_keys, own_values, *, num_context, **masks):
    """The definition for every block alone, in numpy's float64."""
    query, keys, values, own_keys, own_values = (
        np.asarray(x, np.float64) for x in (query, keys, values, own_keys, own_values)
    )
    out = np.zeros_like(query)
    batch, anchors, _, heads, width = query.shape
    for b in range(batch):
        for a in range(anchors):
            if not masks["kept"][b, a]:
                continue
            for head in range(heads):
                group = head // (heads // keys.shape[1])
                shown = np.flatnonzero(masks["present"][b, a])
                seen = int(num_context[b, a])
                k = np.concatenate(
                    [keys[b, group, :seen], own_keys[b, a, shown, group]]
                )
                v = np.concatenate(
                    [values[b, group, :seen], own_values[b, a, shown, group]]
                )
                score = query[b, a, :, head] @ k.T * width**-0.5
                weight = np.exp(score - score.max(axis=1, keepdims=True))
                weight /= weight.sum(axis=1, keepdims=True)
                out[b, a, :, head] = weight @ v
    return out


@pytest.mark.parametrize("anchors", [1, 2, 3, 64])
def test_equals_every_block_alone(anchors):
    arrays, masks = draw()
    config = tuning.ChunksConfig(anchors=anchors)
    call = functools.partial(anchor_attention, config=config, implementation="xla")
    found = jax.jit(call)(**arrays, **masks)
    np.testing.assert_allclose(found, block_by_block(**arrays, **masks), atol=2e-6)


def gradients(call, arrays):
    def loss(arrays):
        return jnp.sum(jnp.sin(call(**arrays)))

    return jax.jit(jax.grad(loss))(arrays)


def whole(function, arrays, masks):
    """All anchors at once, dropped ones set to zero."""
    more = (masks["num_context"], masks["present"], arrays["query"].shape[-1] ** -0.5)
    # By name: a gradient is taken at a dictionary in sorted order.
    names = ("query", "keys", "values", "own_keys", "own_values")
    out = function(*(arrays[name] for name in names), *more)
    return jnp.where(masks["kept"][:, :, None, None, None], out, 0)


@pytest.mark.parametrize("anchors", [2, 3])
def test_gradients_equal_the_definition_s(anchors):
    arrays, masks = draw(1)
    wanted = gradients(lambda **a: whole(reference.attend, a, masks), arrays)
    config = tuning.ChunksConfig(anchors=anchors)
    found = gradients(
        lambda **a: anchor_attention(**a, **masks, config=config, implementation="xla"),
        arrays,
    )
    for name, gradient in found.items():
        np.testing.assert_allclose(gradient, wanted[name], atol=1e-5, err_msg=name)
    dropped = ~np.asarray(masks["kept"])
    assert dropped.any()
    for name in ("query", "own_keys", "own_values"):
        np.testing.assert_array_equal(np.asarray(found[name])[dropped], 0)


@pytest.mark.parametrize(("anchors", "slots", "length"), [(4, 3, 7), (5, 3, 6)])
@pytest.mark.parametrize("skips_context", [False, True])
def test_side_by_side_equals_the_definition(anchors, slots, length, skips_context):
    arrays, masks = draw(2, anchors=anchors, slots=slots, length=length)
    side_by_side = functools.partial(
        joined.attend, implementation="xla", skips_context=skips_context
    )
    with jax.default_matmul_precision("highest"):
        found = whole(side_by_side, arrays, masks)
        slopes = gradients(lambda **a: whole(side_by_side, a, masks), arrays)
    np.testing.assert_allclose(found, whole(reference.attend, arrays, masks), atol=2e-6)
    wanted = gradients(lambda **a: whole(reference.attend, a, masks), arrays)
    for name, gradient in slopes.items():
        np.testing.assert_allclose(gradient, wanted[name], atol=2e-6, err_msg=name)


def test_memory_grows_linearly():
    def temporaries(anchors):
        arrays, masks = draw(3, anchors=anchors, slots=8, length=2048, batch=1)
        config = tuning.ChunksConfig(anchors=8)

        def loss(arrays):
            out = anchor_attention(
                **arrays, **masks, config=config, implementation="xla"
            )
            return jnp.sum(out * out)

        compiled = jax.jit(jax.grad(loss)).lower(arrays).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    small, large = temporaries(32), temporaries(128)
    row_bytes = 4 * 8 * 4 * 8  # float32 [K, H, E] of one anchor
    assert large - small < 96 * 12 * row_bytes
    assert large < 128 * 8 * 4 * 2048 * 4  # far less than one array of all scores


def test_bfloat16_gradients_of_the_context_are_summed_in_float32():
    arrays, masks = draw(4, anchors=48, length=9)
    narrow = {name: x.astype(jnp.bfloat16) for name, x in arrays.items()}
    wide = {name: x.astype(jnp.float32) for name, x in narrow.items()}
    wanted = gradients(lambda **a: whole(reference.attend, a, masks), wide)
    found = gradients(
        lambda **a: anchor_attention(
            **a, **masks, config=tuning.ChunksConfig(anchors=2), implementation="xla"
        ).astype(jnp.float32),
        narrow,
    )
    for name in ("keys", "values"):
        error = np.asarray(found[name], np.float32) - np.asarray(wanted[name])
        assert np.linalg.norm(error) < 8e-3 * np.linalg.norm(wanted[name])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a, m: a.update(query=a["query"][0]), "`query` must have 5 axes, got"),
        (
            lambda a, m: a.update(keys=a["keys"][:1]),
            "`keys` must have shape (B, G, S, E) = (2, G, S, 8), got (1, 2, 11, 8)",
        ),
        (
            lambda a, m: a.update(query=a["query"][:, :, :, :3]),
            "query heads must be a multiple of kv heads, got 3 and 2",
        ),
        (
            lambda a, m: a.update(own_keys=a["own_keys"][:, :4]),
            "`own_keys` must be float32 of shape (2, 5, 3, 2, 8), got float32 (2, 4,",
        ),
        (
            lambda a, m: m.update(num_context=m["num_context"][:1]),
            "`num_context` must be int32 of shape (2, 5), got int32 (1, 5)",
        ),
        (
            lambda a, m: m.update(kept=m["num_context"]),
            "`kept` must be bool of shape (2, 5), got int32 (2, 5)",
        ),
        (
            lambda a, m: m.update(implementation="triton"),
            "`implementation` must be one of 'xla', 'cudnn', 'mosaic_gpu', got",
        ),
    ],
)
def test_refuses(change, message):
    arrays, masks = draw()
    change(arrays, masks)
    with pytest.raises(ValueError, match=re.escape(message)):
        anchor_attention(**arrays, **masks)


def test_cudnn_says_why():
    arrays, masks = draw()
    with pytest.raises(
        NotImplementedError, match="'cudnn' can't run this: cuDNN takes"
    ):
        anchor_attention(**arrays, **masks, implementation="cudnn")
    narrow = {name: x.astype(jnp.bfloat16) for name, x in arrays.items()}
    assert joined.supports(narrow["query"], narrow["keys"]) is None
    wide = jnp.zeros((1, 1, 1, 1, 256), jnp.bfloat16)
    assert "head width must be a multiple of 8" in joined.supports(wide, wide)
    with pytest.raises(ValueError, match="`anchors` must be at least 1, got 0"):
        tuning.ChunksConfig(anchors=0)


@pytest.mark.gpu
def test_cudnn_equals_the_definition_on_a_gpu():
    arrays, masks = draw(5, anchors=40, slots=7, length=300, width=64)
    arrays = {name: x.astype(jnp.bfloat16) for name, x in arrays.items()}
    config = tuning.ChunksConfig(anchors=16)
    runs = {
        name: gradients(
            lambda name=name, **a: anchor_attention(
                **a, **masks, config=config, implementation=name
            ).astype(jnp.float32),
            arrays,
        )
        for name in ("xla", "cudnn")
    }
    for name, wanted in runs["xla"].items():
        wanted = np.asarray(wanted, np.float32)
        error = np.asarray(runs["cudnn"][name], np.float32) - wanted
        assert np.linalg.norm(error) < 2e-2 * np.linalg.norm(wanted), name
