"""The third ring: every case on an NVIDIA GPU."""

import time

import pytest

from pallas_kernels import bench_anchor, bench_check, cases

pytestmark = pytest.mark.gpu


CACHED = (*cases.SMALL, *cases.FLOAT32)


@pytest.mark.parametrize("name", ["xla", "mosaic_gpu", "triton"])
@pytest.mark.parametrize("case", CACHED, ids=lambda case: f"{case.kind} {case.name}")
def test_equals_the_definition(case, name):
    check(bench_check.checks([name], [case], time.monotonic() + 600))


@pytest.mark.parametrize("name", ["xla", "cudnn", "mosaic_gpu"])
@pytest.mark.parametrize("case", cases.ANCHOR_SMALL, ids=lambda case: case.name)
def test_anchors_equal_the_definition(case, name):
    check(bench_anchor.checks([name], [case], time.monotonic() + 600))


def check(rows):
    rows = list(rows)
    assert rows
    wrong = [row for row in rows if "error" in row or row.get("is_wrong")]
    assert not wrong, wrong
