"""An optional ring: full compilation for an H200, a v5e and a v6e without any of them.

Runs where the compilers are installed, with JAX_PLATFORMS unset for the GPU's:

    pip install 'jax-cuda13-plugin[with-cuda]'     # the version of the installed jax
    pip install libtpu

and LD_LIBRARY_PATH naming the `lib` folders of the nvidia packages.
"""

import functools
import importlib.util
import pathlib

import jax
import pytest
from jax.experimental import topologies

from pallas_kernels import bench_anchor, cached_attention, cases

pytestmark = pytest.mark.slow
NAMES = (
    "block 1x8192",
    "block 64xragged",
    "verify paged 64xragged",
    "smollm2 verify 8x1024",
    "window",
    "width 256",
    "pages of 16",
)
CACHED = [case for case in (*cases.BENCH, *cases.SMALL) if case.name in NAMES]
of_cached = pytest.mark.parametrize(
    "case", CACHED, ids=lambda case: f"{case.kind} {case.name}"
)
needs_gpu_compiler = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None,
    reason="jax-cuda13-plugin is not installed",
)


@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed"
)
@pytest.mark.parametrize("name", ["v5e:2x2", "v6e:2x2"])
@of_cached
def test_compiles_for_tpus(case, name):
    topology = topologies.get_topology_desc(platform="tpu", topology_name=name)
    check_cached(topology, "mosaic_tpu", case)


@needs_gpu_compiler
@of_cached
def test_compiles_for_an_h200(case):
    check_cached(h200(), "mosaic_gpu", case)


@needs_gpu_compiler
@pytest.mark.parametrize(
    "case", [*cases.ANCHOR, *cases.ANCHOR_SMALL[:3]], ids=lambda case: case.name
)
def test_anchors_compile_for_an_h200(case):
    arrays, masks = placed(h200(), bench_anchor.shapes_of(case))
    call = functools.partial(bench_anchor.gradients, name="mosaic_gpu", config=None)
    lowered = jax.jit(call).lower(arrays, masks, arrays["query"])
    assert "custom-call" in lowered.compile().as_text()


def check_cached(topology, implementation, case):
    arguments, arrays, static = cases.cached_shapes(case)
    arguments, arrays = placed(topology, (arguments, arrays))
    function = getattr(cached_attention, f"{case.kind}_attention")
    call = functools.partial(function, implementation=implementation, **static)
    lowered = jax.jit(call).lower(*arguments, **arrays)
    assert "custom-call" in lowered.compile().as_text()


def h200():
    config = (pathlib.Path(__file__).parent / "h200.pbtxt").read_text()
    return topologies.get_topology_desc(
        platform="cuda", topology="1x1x1", target_config=config
    )


def placed(topology, shapes):
    sharding = jax.sharding.SingleDeviceSharding(topology.devices[0])
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes
    )
