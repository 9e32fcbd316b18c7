"""The second ring: lowered for GPUs and TPUs on a machine without either."""

import functools
import warnings

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import _compat, cached_attention, cases
from pallas_kernels.cached_attention import tuning

needs_mosaic_gpu = pytest.mark.skipif(
    _compat.mosaic_gpu_missing() is not None, reason=str(_compat.mosaic_gpu_missing())
)
LARGE = {case.name: case for case in cases.BENCH}


def shapes(case):
    """The case's function and its arguments as shapes."""
    batch, heads = len(case.lengths), case.heads
    number = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    rows = case.rows if isinstance(case.rows, tuple) else (case.rows,) * batch
    total = sum(rows)
    cache = (batch, case.kv_heads, case.size, case.width)
    arrays = {}
    if case.page is not None:
        pages = case.size // case.page
        cache = (batch * pages, case.kv_heads, case.page, case.width)
        arrays["page_table"] = number((batch, pages))
    dtype = jnp.dtype(case.dtype)
    keys = jax.ShapeDtypeStruct(cache, dtype)
    query = (total, heads, case.width)
    static = {"window": case.window}
    if case.kind == "block":
        query = (batch, rows[0], heads, case.width)
        arrays["num_keys"] = number((batch,))
        function = cached_attention.block_attention
    else:
        arrays |= {"num_keys": number((total,)), "slots": number((total,))}
        static["max_rows"] = max(rows)
        function = cached_attention.verify_attention
    return (
        functools.partial(function, **static),
        (jax.ShapeDtypeStruct(query, dtype), keys, keys),
        arrays,
    )


def lowered(case, platform, **more):
    function, arguments, arrays = shapes(case)
    traced = jax.jit(functools.partial(function, **more)).trace(*arguments, **arrays)
    return traced.lower(lowering_platforms=(platform,)).as_text()


@needs_mosaic_gpu
@pytest.mark.parametrize(
    "name", ["block 1x8192", "verify paged 64xragged", "smollm2 verify 8x1024"]
)
@pytest.mark.parametrize("max_parts", [1, 4])
def test_mosaic_gpu_lowers(name, max_parts):
    config = tuning.MosaicGpuConfig(max_parts=max_parts, stages=3)
    text = lowered(LARGE[name], "cuda", implementation="mosaic_gpu", config=config)
    assert text.count("stablehlo.custom_call @mosaic_gpu") == (
        1 if max_parts == 1 else 2
    )


@needs_mosaic_gpu
@pytest.mark.parametrize("name", ["width 256", "window", "pages of 16"])
def test_mosaic_gpu_lowers_small(name):
    case = next(case for case in cases.SMALL if case.name == name)
    assert "mosaic_gpu" in lowered(case, "cuda", implementation="mosaic_gpu")


@pytest.mark.parametrize("kind", ["TPU v5 lite", "TPU v6 lite", "TPU v5"])
@pytest.mark.parametrize("name", ["block 1x8192", "verify paged 64xragged"])
def test_mosaic_tpu_lowers(name, kind):
    with _compat.abstract_tpu(kind), warnings.catch_warnings():
        text = lowered(LARGE[name], "tpu", implementation="mosaic_tpu")
    assert "tpu_custom_call" in text


def test_xla_lowers_everywhere():
    for platform in ("cuda", "tpu", "cpu"):
        assert "dot_general" in lowered(LARGE["block 1x8192"], platform)
