"""Marks for tests of kernels that this JAX may lack."""

import pytest

from pallas_kernels import _compat

needs_mosaic_gpu = pytest.mark.skipif(
    _compat.mosaic_gpu_missing() is not None, reason=str(_compat.mosaic_gpu_missing())
)
