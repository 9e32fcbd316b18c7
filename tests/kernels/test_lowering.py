"""The second ring: lowered for GPUs and TPUs on a machine without either."""

import functools
import warnings

import jax
import pytest
from kernel_marks import needs_mosaic_gpu

from pallas_kernels import _compat, cached_attention, cases
from pallas_kernels.cached_attention import tuning

LARGE = {case.name: case for case in cases.BENCH}


def lowered(case, platform, **more):
    arguments, arrays, static = cases.cached_shapes(case)
    function = getattr(cached_attention, f"{case.kind}_attention")
    call = jax.jit(functools.partial(function, **static, **more))
    traced = call.trace(*arguments, **arrays)
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
        text = lowered(LARGE["block 1x8192"], platform, implementation="xla")
        assert "dot_general" in text
