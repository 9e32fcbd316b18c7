"""On an NVIDIA GPU: chained calls, whose kernels overlap, equal separate ones."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import bench_check, cases
from pallas_kernels.cached_attention import tuning

pytestmark = pytest.mark.gpu
CELLS = [
    ("block 1x2048", {"max_parts": 19}),
    ("block 8x2048", {"max_parts": 5}),
    ("block 64xragged", {"max_parts": 2}),
    ("block 64x1024", {"max_parts": 1}),
    ("verify paged 8x8192", {"max_parts": 5}),
]


@pytest.mark.parametrize(("name", "fields"), CELLS, ids=[cell[0] for cell in CELLS])
def test_overlapping_kernels_equal_separate_ones(name, fields):
    case = next(case for case in cases.BENCH if case.name == name)
    found = cases.cached_inputs(case, draw=cases.drawn_on_device)
    overlapping = tuning.MosaicGpuConfig(warpgroups=2, **fields)
    separate = dataclasses.replace(overlapping, overlaps=False)

    def chained(config):
        call = jax.jit(
            bench_check.call_of(case, found, implementation="mosaic_gpu", config=config)
        )

        @jax.jit
        def outputs(query):
            found_by_call = []
            for _ in range(12):
                # Each call reads what the one before wrote, and memory is used again.
                query = call(query, found.keys, found.values) * 30
                found_by_call.append(jnp.sum(query.astype(jnp.float32), axis=-1))
                query = call(query, found.keys, found.values)
            return query, found_by_call

        return jax.tree.map(np.asarray, [outputs(found.query) for _ in range(20)])

    reference = chained(separate)[0]
    assert np.all(np.isfinite(reference[0].astype(np.float32)))
    for one in chained(overlapping):
        jax.tree.map(np.testing.assert_array_equal, one, reference)
