"""`anchor_attention` on `mosaic_gpu`: its tables, and its kernels interpreted."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_marks import needs_mosaic_gpu

from pallas_kernels import _compat, bench_anchor, cases
from pallas_kernels.anchor_attention import (
    anchor_attention,
    mosaic_gpu,
    mosaic_gpu_plan,
    tuning,
)

SMALL = {case.name: case for case in cases.ANCHOR_SMALL}
# One of them: the interpreter takes seconds a case. The rest is marked slow.
QUICK = "two sequences, two kv heads"
SETTINGS = {
    QUICK: {},
    "ragged": {"shares_rows": True, "takes_turns": False},
    "long": {"row_stages": 2},
}
TYPES = (jnp.bfloat16, jnp.bfloat16)


def shapes(slots=3, heads=4, width=64, dtypes=TYPES, kv_heads=1):
    query = jax.ShapeDtypeStruct((1, 5, slots, heads, width), dtypes[0])
    return query, jax.ShapeDtypeStruct((1, kv_heads, 96, width), dtypes[1])


@needs_mosaic_gpu
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name == QUICK else pytest.mark.slow)
        for name in SMALL
        if name not in ("many anchors", "huge logits")
    ],
)
def test_interpreter_equals_the_definition(name, monkeypatch):
    attend = mosaic_gpu.attend
    monkeypatch.setattr(
        mosaic_gpu,
        "attend",
        functools.partial(attend, interpret=_compat.gpu_interpreter()),
    )
    settings = SETTINGS.get(name, {"key_tile": 64, "warpgroups": 1})
    case, config = SMALL[name], tuning.MosaicGpuConfig(**settings)
    arrays, masks = bench_anchor.inputs_of(case)
    weights = cases.drawn_on_host(3, arrays["query"].shape, jnp.bfloat16)

    def run(arrays, **more):
        call = functools.partial(bench_anchor.gradients, **more)
        return jax.jit(call)(arrays, masks, weights)

    wide = {key: x.astype(jnp.float32) for key, x in arrays.items()}
    wanted = run(wide, name="xla", config=None)
    found = run(arrays, name="mosaic_gpu", config=config)
    dropped = ~np.asarray(masks["kept"])
    for key, value in found.items():
        value = np.asarray(value, np.float32)
        error = np.linalg.norm(value - np.asarray(wanted[key]))
        assert error <= 8e-3 * np.linalg.norm(np.asarray(wanted[key])), key
        if key not in ("keys", "values"):
            np.testing.assert_array_equal(value[dropped], 0, err_msg=key)


def test_tables_hold_every_block_once_and_ascend():
    query, keys = shapes(heads=2)
    shape = mosaic_gpu.shape_of(query, keys)
    assert (shape.blocks, shape.slot_rows, shape.tiles) == (4, 8, 2)
    context = jnp.asarray([[70, 3, 96, 3, 200]], jnp.int32)  # 200: as many as there are
    kept = jnp.asarray([[True, True, False, True, True]])
    present = jnp.asarray(np.arange(15).reshape(1, 5, 3) % 4 < 3)
    plan = mosaic_gpu_plan.make(context, present, kept, shape=shape)
    # Dropped blocks and those that don't exist come first.
    np.testing.assert_array_equal(plan.blocks, [[2, -1, -1, -1], [1, 3, 0, 4]])
    np.testing.assert_array_equal(plan.low, [[0, 3]])
    np.testing.assert_array_equal(plan.high, [[0, 96]])
    row = np.asarray(plan.row_blocks[1]).reshape(4, 2, 8)  # block, head, slot
    np.testing.assert_array_equal(row[..., 3:], -1)
    for block in range(4):
        np.testing.assert_array_equal(row[block, :, :3], block)
    np.testing.assert_array_equal(plan.row_blocks[0], -1)
    limits = np.asarray(plan.limits[1]).reshape(4, 16)
    np.testing.assert_array_equal(limits[:, 0], [3, 3, 70, 96])
    own = np.asarray(plan.key_blocks[1]).reshape(8, 8)
    np.testing.assert_array_equal(own[0, :4], [-2, 0, 0, -2])  # its slot 0 is absent
    np.testing.assert_array_equal(own[4:], -2)
    first, full = mosaic_gpu_plan.seeing(plan, key_tile=32, length=96)
    np.testing.assert_array_equal(first, [1, 1, 1])
    np.testing.assert_array_equal(full, [2, 2, 2])


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (shapes(dtypes=(jnp.float32, jnp.float32)), "wgmma multiplies bfloat16 keys"),
        (shapes(width=96), "head width must be 64 or 128, got 96"),
        (shapes(slots=16, heads=8), "8 query heads of 16 rows"),
        (shapes(slots=33, heads=2), "2 query heads of 64 rows"),
        (shapes(slots=8, heads=9), "9 query heads of 8 rows"),
    ],
)
@needs_mosaic_gpu
def test_says_why(found, message):
    assert message in mosaic_gpu.supports(*found)


@needs_mosaic_gpu
def test_says_why_settings_do_not_fit():
    assert mosaic_gpu.supports(*shapes()) is None
    assert "the scale must be positive, got -1.0" in mosaic_gpu.supports(
        *shapes(), scale=-1.0
    )
    config = tuning.MosaicGpuConfig(stages=9)
    message = mosaic_gpu.supports(*shapes(width=128), config=config)
    assert "bytes of shared memory, the limit is 232448" in message


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"key_tile": 96}, "`key_tile` must be a positive multiple of 64, got 96"),
        ({"row_key_tile": 0}, "`row_key_tile` must be a positive multiple of 64, got"),
        ({"warpgroups": 3}, "`warpgroups` must be 1 or 2, got 3"),
        ({"stages": 0}, "`stages` must be at least 1, got 0"),
        ({"row_stages": 1}, "`row_stages` must be at least `warpgroups` = 2, got 1"),
        ({"context_stages": 3}, "`context_stages` must be a positive even number, got"),
    ],
)
def test_settings_are_checked(settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        tuning.MosaicGpuConfig(**settings)


def test_settings_of_another_implementation_are_refused():
    arrays = cases.anchor_inputs(SMALL["no context"])
    with pytest.raises(
        TypeError, match="`config` of implementation 'xla' must be a ChunksConfig, got"
    ):
        anchor_attention(
            **arrays, implementation="xla", config=tuning.MosaicGpuConfig()
        )


@needs_mosaic_gpu
def test_lowers_for_cuda():
    case, config = cases.ANCHOR[0], tuning.MosaicGpuConfig(shares_rows=True)
    arrays, masks = bench_anchor.shapes_of(case)
    weights = arrays["query"]
    traced = jax.jit(
        functools.partial(bench_anchor.gradients, name="mosaic_gpu", config=config)
    ).trace(arrays, masks, weights)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call @mosaic_gpu") == 3
