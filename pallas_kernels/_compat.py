"""Every difference between the JAX versions that the kernels meet, in one place.

Written against 0.10.2, 0.11.2 and 0.12.0: what moved between them is hidden here, so
that a kernel reads the same everywhere.
"""

import contextlib
from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

JAX_VERSION = tuple(int(part) for part in jax.__version__.split(".")[:3])


def gpu_interpreter(**settings: Any) -> Any:
    """Parameters that run a Mosaic GPU kernel on the CPU (private before 0.12)."""
    if hasattr(plgpu, "InterpretGPUParams"):
        return plgpu.InterpretGPUParams(**settings)
    from jax._src.pallas.mosaic_gpu.interpret import params

    return params.InterpretGPUParams(**settings)


def mosaic_gpu_missing() -> str | None:
    """Why Mosaic GPU kernels can't be built by this JAX, or None.

    JAX 0.10 infers no layout for transfers between registers and rows in plain order,
    and its interpreter can't multiply by a transposed tile.
    """
    if JAX_VERSION < (0, 11):
        return f"Mosaic GPU kernels need JAX 0.11 or newer, got {jax.__version__}"
    return None


def is_unpartitioned() -> bool:
    """Whether no partitioner will see it: one device, or inside `shard_map`."""
    if jax.device_count() == 1:
        return True
    mesh = jax.sharding.get_abstract_mesh()
    return bool(mesh.axis_names) and set(mesh.manual_axes) == set(mesh.axis_names)


@contextlib.contextmanager
def abstract_tpu(kind: str = "TPU v5 lite") -> Any:
    """Inside, a program can be lowered for a TPU on a machine without one."""
    device = jax.sharding.AbstractDevice(device_kind=kind, num_cores=1, platform="tpu")
    mesh = jax.sharding.AbstractMesh(
        (1,), ("x",), (jax.sharding.AxisType.Explicit,), abstract_device=device
    )
    with jax.sharding.use_abstract_mesh(mesh):
        yield
