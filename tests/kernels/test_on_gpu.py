"""The third ring: every case on an NVIDIA GPU."""

import time

import pytest

from pallas_kernels import bench_anchor, bench_check, cases

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", ["xla", "mosaic_gpu", "triton"])
def test_equals_the_definition(name):
    rows = list(
        bench_check.checks(
            [name], (*cases.SMALL, *cases.FLOAT32), time.monotonic() + 600
        )
    )
    wrong = [row for row in rows if "error" in row or row.get("is_wrong")]
    assert not wrong, wrong


@pytest.mark.parametrize("name", ["xla", "cudnn", "mosaic_gpu"])
def test_anchors_equal_the_definition(name):
    rows = list(bench_anchor.checks([name], cases.ANCHOR_SMALL, time.monotonic() + 600))
    wrong = [row for row in rows if "error" in row or row.get("is_wrong")]
    assert not wrong, wrong
