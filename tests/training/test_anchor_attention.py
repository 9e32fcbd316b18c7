"""All blocks of a sequence in one kernel equal block by block; who that is, and why."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_marks import needs_mosaic_gpu

from dspark_jax import layers
from dspark_jax.training import (
    anchor_attention,
    settings,
    sharding,
    step,
    target_states,
    vocabulary,
)
from dspark_jax.training import anchors as anchors_lib
from dspark_jax.training.anchors import Anchors
from pallas_kernels import _compat, _dispatch
from pallas_kernels import anchor_attention as kernels
from pallas_kernels.anchor_attention import mosaic_gpu

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture
def by_xla(monkeypatch):
    """Whatever is named, the definition in float32 does it."""
    definition = kernels.anchor_attention

    def attend(*arrays, implementation, **more):
        assert implementation == "mosaic_gpu"
        with jax.default_matmul_precision("highest"):  # a GPU would use TF32
            return definition(*arrays, **more, implementation="xla")

    monkeypatch.setattr(kernels, "anchor_attention", attend)


def draw(batch, slots, context, several_sizes):
    """Arrays that are differentiated, anchors with one dropped, and their masks."""
    anchors, heads, groups, width = 3, 4, 2, 8
    keys = iter(jax.random.split(jax.random.key(0), 9))

    def normal(*shape):
        return jax.random.normal(next(keys), shape, jnp.float32)

    query = normal(batch, anchors, slots, heads, width)
    shared = [normal(batch, groups, context, width) for _ in range(2)]
    own = [normal(batch, anchors, slots, groups, width) for _ in range(2)]
    places = jax.random.randint(next(keys), (batch, anchors), 0, context)
    keep = jnp.arange(batch * anchors).reshape(batch, anchors) != 4
    index = jnp.arange(context, dtype=jnp.int32)
    visible = (index[None, None] < places[..., None])[:, :, None]
    in_block = None
    if several_sizes:
        sizes = jax.random.randint(next(keys), (batch, anchors), 1, slots + 1)
        index = jnp.arange(slots, dtype=jnp.int32)
        in_block = (index[None, None] < sizes[..., None])[:, :, None]
    masks = visible, in_block
    return (query, shared, own), Anchors(positions=places, keep=keep), masks


def attended(function, arrays, masks, keep):
    """Outputs and gradients of the anchors that are kept."""
    visible, in_block = masks

    def loss(query, shared, own):
        out = function(query, [(*shared, visible), (*own, in_block)])
        return jnp.sum(jnp.where(keep[..., None, None, None], jnp.sin(out), 0)), out

    run = jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)
    (_, out), slopes = jax.jit(run)(*arrays)
    return out, slopes


def same(found, wanted, keep):
    np.testing.assert_allclose(found[0][keep], wanted[0][keep], atol=1e-6)
    for mine, other in zip(*map(jax.tree.leaves, (found[1], wanted[1])), strict=True):
        np.testing.assert_allclose(mine, other, atol=2e-6)


@pytest.mark.parametrize(("slots", "context"), [(3, 7), (4, 6), (5, 9)])
@pytest.mark.parametrize("several_sizes", [False, True])
def test_blocks_equal_grouped(small, by_xla, slots, context, several_sizes):
    arrays, anchors, masks = draw(2, slots, context, several_sizes)
    attend = anchor_attention.make("mosaic_gpu", small[2][0], anchors)
    found = attended(attend, arrays, masks, anchors.keep)
    same(
        found,
        attended(layers.grouped_attention, arrays, masks, anchors.keep),
        np.asarray(anchors.keep),
    )
    assert not np.any(found[0][~np.asarray(anchors.keep)])


@pytest.mark.parametrize("batch", [8, 3])  # 3: devices do not divide it
def test_devices_attend_their_own_rows(small, by_xla, batch):
    arrays, anchors, masks = draw(batch, 3, 7, True)
    mesh = sharding.make_mesh(4, 2, jax.devices("cpu"))
    if batch % mesh.size == 0:
        placed = sharding.batch_sharding(mesh)
        arrays, anchors, masks = jax.device_put((arrays, anchors, masks), placed)
    attend = anchor_attention.make("mosaic_gpu", small[2][0], anchors, mesh)
    found = attended(attend, arrays, masks, anchors.keep)
    wanted = attended(layers.grouped_attention, arrays, masks, anchors.keep)
    same(jax.device_get(found), jax.device_get(wanted), np.asarray(anchors.keep))
    run = jax.jit(attend)
    visible, in_block = masks
    query, shared, own = arrays
    text = run.lower(query, [(*shared, visible), (*own, in_block)]).compile().as_text()
    assert "all-gather" not in text or batch % mesh.size


def test_layers_share_a_lowering(small, by_xla):
    arrays, anchors, masks = draw(2, 3, 7, False)
    attend = anchor_attention.make("mosaic_gpu", small[2][0], anchors)
    (query, shared, own), visible = arrays, masks[0]

    def three(query):
        for _ in range(3):
            query = attend(query, [(*shared, visible), (*own, None)])
        return query

    text = jax.jit(three).lower(query).as_text()
    assert text.count("func.func private @by_kernel") == 1
    assert text.count("call @by_kernel") == 3


def wide(drafter, **changes):
    """A drafter whose blocks a kernel can attend."""
    block = dataclasses.replace(
        drafter.block, width=256, num_heads=4, num_kv_heads=2, head_width=64
    )
    changes = {"compute_dtype": "bfloat16", "block": block} | changes
    return dataclasses.replace(drafter, **changes)


@pytest.mark.parametrize(
    ("capability", "num_devices", "in_shard_map", "changes", "name"),
    [
        ((9, 0), 1, False, {}, "mosaic_gpu"),
        ((9, 0), 1, False, {"block_size": 15}, "mosaic_gpu"),
        ((9, 0), 8, False, {}, "cudnn"),
        ((9, 0), 8, True, {}, "mosaic_gpu"),
        ((8, 0), 1, False, {}, "cudnn"),
        ((7, 5), 1, False, {}, "xla"),
        ((9, 0), 1, False, {"compute_dtype": "float16"}, "cudnn"),
        ((9, 0), 1, False, {"compute_dtype": "float32"}, "xla"),
        ((9, 0), 1, False, {"block_size": 40}, "cudnn"),
    ],
)
def test_auto_on_a_gpu(
    small, monkeypatch, capability, num_devices, in_shard_map, changes, name
):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "device_count", lambda: num_devices)
    monkeypatch.setattr(_dispatch, "compute_capability", lambda: capability)
    monkeypatch.setattr("pallas_kernels._compat.mosaic_gpu_missing", lambda: None)
    drafter = wide(small[2][0], **changes)
    found = anchor_attention.choose("auto", drafter, in_shard_map=in_shard_map)
    assert found == name


def test_auto_is_xla_elsewhere_and_names_stay(small, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    drafter = small[2][0]
    assert anchor_attention.choose("auto", wide(drafter)) == "xla"
    assert anchor_attention.choose("cudnn", drafter) == "cudnn"
    assert anchor_attention.make("auto", drafter, None) is layers.grouped_attention
    for name, capability in (("cudnn", "8.0"), ("mosaic_gpu", "9.0")):
        reason = anchor_attention.refused(name, wide(drafter))
        assert reason == f"needs compute capability {capability}, got 0.0"
    assert anchor_attention.refused("xla", drafter) is None


@needs_mosaic_gpu
def test_a_step_s_gradients_by_the_kernel(small, monkeypatch):
    """Blocks of several sizes, a sequence with dummies, and heads alone."""
    interpreted = functools.partial(
        mosaic_gpu.attend, interpret=_compat.gpu_interpreter()
    )
    monkeypatch.setattr(mosaic_gpu, "attend", interpreted)
    target, target_params, drafters, batch = small
    block = dataclasses.replace(
        drafters[0].block, num_heads=2, num_kv_heads=1, head_width=64
    )
    narrow = dataclasses.replace(drafters[0], compute_dtype="bfloat16", block=block)
    heads = settings.Recipe(trainable="heads")
    batch = jax.tree.map(lambda x: x[:2], batch)
    # The second row has fewer candidates than anchors are asked for.
    mask = batch.loss_mask.at[1, 5:].set(False)
    batch = batch.replace(loss_mask=mask)
    params = step.init_params(jax.random.key(0), narrow, target_params.final_norm)
    states = target_states.compute(target, target_params, batch, narrow.tap_layers)
    anchors = anchors_lib.sample(jax.random.key(2), mask, 6, sizes=(1, 3))
    assert not np.all(anchors.keep)

    def gradients(attention, drafter=narrow):
        run = functools.partial(
            step.gradients,
            embed=functools.partial(target.embed, target_params),
            head=vocabulary.head_matrix(target, target_params),
            ce=jnp.full((2,), 0.1, jnp.float32),
            drafters=(drafter, drafter),
            recipes=(settings.Recipe(), heads),
            config=settings.TrainConfig(attention=attention),
        )
        (found, only_heads), outcomes = jax.jit(run)(
            (params, params), batch, states, anchors
        )
        assert not any(np.any(x) for x in jax.tree.leaves(only_heads.backbone))
        assert np.any(only_heads.markov.w2)
        return jax.device_get(found), outcomes[0].loss

    exact, loss = gradients("xla", dataclasses.replace(narrow, compute_dtype="float32"))
    errors = []
    for attention in ("mosaic_gpu", "xla"):
        found, narrow_loss = gradients(attention)
        np.testing.assert_allclose(narrow_loss, loss, rtol=1e-3)
        off = jax.tree.map(lambda x, y: np.linalg.norm(x - y), found, exact)
        errors.append(jax.tree.leaves(off))
    # As near to float32 as XLA's, in every array.
    sizes = jax.tree.leaves(jax.tree.map(np.linalg.norm, exact))
    for by_kernel, by_xla, size in zip(*errors, sizes, strict=True):
        assert by_kernel <= 1.25 * by_xla + 1e-3 * size
