"""Several devices: a mesh, and who holds what.

The step is written for one device; annotations on its arguments spread it. Rows go
over both axes of the mesh. Parameters and optimiser are copied along "data" and cut
along "fsdp": each array on its longest axis that the size of "fsdp" divides. Sums over
the batch are global, so that one denominator holds for all devices (DeepSpec's rule).
"""

from collections.abc import Sequence

import jax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dspark_jax.types import PyTree

AXES = ("data", "fsdp")
_SMALL = 2**14  # elements; smaller arrays are copied


def make_mesh(
    data_parallel: int = 0,
    fsdp: int = 1,
    devices: Sequence[jax.Device] | None = None,
) -> Mesh:
    """A mesh of data_parallel x fsdp devices with automatic axes.

    Args:
      data_parallel: copies of the parameters; 0: as many as the devices allow.
      fsdp: devices among which one copy is cut.
      devices: to choose from, in order; None: all.

    Raises:
      ValueError: the devices do not suffice, or `fsdp` does not divide them.
    """
    devices = jax.devices() if devices is None else devices
    if fsdp < 1 or data_parallel < 0:
        raise ValueError(
            "data_parallel must be at least 0 and fsdp at least 1, got "
            f"{data_parallel} and {fsdp}"
        )
    if data_parallel == 0 and len(devices) % fsdp:
        raise ValueError(f"fsdp must divide the {len(devices)} devices, got {fsdp}")
    data_parallel = data_parallel or len(devices) // fsdp
    needed = data_parallel * fsdp
    if needed > len(devices):
        raise ValueError(
            f"data_parallel x fsdp must be at most the {len(devices)} devices, got "
            f"{data_parallel} x {fsdp}"
        )
    return jax.make_mesh(
        (data_parallel, fsdp),
        AXES,
        axis_types=(AxisType.Auto,) * 2,
        devices=devices[:needed],
    )


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows [B, ...] over all devices; B must be a multiple of their number."""
    return NamedSharding(mesh, P(AXES))


def replicated(mesh: Mesh) -> NamedSharding:
    """A copy on every device."""
    return NamedSharding(mesh, P())


def state_sharding(mesh: Mesh, state: PyTree) -> PyTree:
    """A sharding for every array of parameters or optimiser state."""
    return jax.tree.map(lambda x: NamedSharding(mesh, _spec(x, mesh)), state)


def _spec(array: jax.Array, mesh: Mesh) -> P:
    size = mesh.shape["fsdp"]
    fits = [axis for axis, length in enumerate(array.shape) if length % size == 0]
    if size == 1 or not fits or array.size < _SMALL:
        return P()
    longest = max(fits, key=lambda axis: array.shape[axis])
    return P(*("fsdp" if axis == longest else None for axis in range(array.ndim)))
