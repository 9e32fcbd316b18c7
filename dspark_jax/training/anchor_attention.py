"""Attention of many blocks a sequence over one context, for training: by whom, and how.

`TrainConfig.attention` names who attends the drafters' blocks. "auto" is the first of
`pallas_kernels.anchor_attention.PREFERRED` that can run a drafter's blocks on this
machine, or else "xla"; on a CPU that is "xla". A name is run as it is, or refused with
the reason. The target's rows, which see one another causally, are `target_states`'s.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from dspark_jax import layers
from dspark_jax.config import DrafterConfig
from dspark_jax.training.anchors import Anchors
from pallas_kernels import anchor_attention

Segments = Sequence[tuple[jax.Array, jax.Array, jax.Array | None]]


def choose(
    implementation: str, drafter: DrafterConfig, *, in_shard_map: bool = False
) -> str:
    """Who attends this drafter's blocks: "xla", "cudnn" or "mosaic_gpu".

    Args:
      implementation: "auto", or a name, which is the answer.
      in_shard_map: rows are spread over a mesh that `make` will be given.
    """
    if implementation != "auto":
        return implementation
    for name in anchor_attention.PREFERRED.get(jax.default_backend(), ()):
        if refused(name, drafter, in_shard_map=in_shard_map) is None:
            return name
    return "xla"


def refused(
    name: str, drafter: DrafterConfig, *, in_shard_map: bool = False
) -> str | None:
    """Why `name` can't attend this drafter's blocks on this machine, or None."""
    reason = anchor_attention.unavailable(name, in_shard_map=in_shard_map)
    if reason is not None:
        return reason
    block, dtype = drafter.block, layers.dtype_of(drafter.compute_dtype)
    # Any number of rows and anchors and any length will do.
    query = (1, 1, drafter.block_size, block.num_heads, block.head_width)
    keys = (1, block.num_kv_heads, 8, block.head_width)
    return anchor_attention.supports(
        name, jax.ShapeDtypeStruct(query, dtype), jax.ShapeDtypeStruct(keys, dtype)
    )


def make(
    implementation: str,
    drafter: DrafterConfig,
    anchors: Anchors,
    mesh: Mesh | None = None,
) -> Callable[[jax.Array, Segments], jax.Array]:
    """A function like `layers.grouped_attention` for the blocks of these anchors.

    Its first segment is the context, of which a block sees the keys before its anchor;
    its second the blocks' own rows.
    """
    # A mesh of one device leaves nothing to partition either.
    name = choose(implementation, drafter, in_shard_map=mesh is not None)
    if name == "xla":
        return layers.grouped_attention

    def attend(
        query: Float[Array, "B A K H E"], segments: Segments
    ) -> Float[Array, "B A K H E"]:
        (keys, values, _), (own_keys, own_values, in_block) = segments
        if in_block is None:
            present = jnp.ones(query.shape[:3], jnp.bool_)
        else:
            present = in_block[:, :, 0]
        return by_kernel(
            query,
            keys,
            values,
            own_keys,
            own_values,
            anchors.positions,
            present,
            anchors.keep,
            name=name,
            mesh=mesh,
        )

    return attend


# Jitted: layers of one shape, and drafters of one shape, share a lowering.
@functools.partial(jax.jit, static_argnames=("name", "mesh"))
def by_kernel(
    query: Float[Array, "B A K H E"],
    keys: Float[Array, "B G S E"],
    values: Float[Array, "B G S E"],
    own_keys: Float[Array, "B A K G E"],
    own_values: Float[Array, "B A K G E"],
    num_context: jax.Array,
    present: jax.Array,
    kept: jax.Array,
    *,
    name: str,
    mesh: Mesh | None,
) -> Float[Array, "B A K H E"]:
    """`pallas_kernels.anchor_attention`, on every device of a mesh for its own rows.

    No partitioner looks into a kernel: inside `shard_map` each device runs one for its
    part of the batch, and nothing is sent.

    Args:
      num_context: int32 [B, A].
      present: bool [B, A, K].
      kept: bool [B, A]; rows of other anchors are zero.
      name: the implementation.
      mesh: over all of whose axes B is spread; None: over none.

    Raises:
      NotImplementedError: it can't run these arrays.
    """

    def call(*arrays: jax.Array) -> jax.Array:
        *numbers, num_context, present, kept = arrays
        return anchor_attention.anchor_attention(
            *numbers,
            num_context=num_context,
            present=present,
            kept=kept,
            implementation=name,
        )

    arrays: tuple[jax.Array, ...] = (query, keys, values, own_keys, own_values)
    arrays += (num_context, present, kept)
    if mesh is None or mesh.size == 1:
        return call(*arrays)
    # Rows of nothing, where the devices do not divide the batch.
    more = -query.shape[0] % mesh.size
    arrays = tuple(
        jnp.pad(array, ((0, more), *((0, 0),) * (array.ndim - 1))) for array in arrays
    )
    rows = P(mesh.axis_names)
    # The kernels' results carry no record of how they vary over the mesh.
    spread = jax.shard_map(
        call, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False
    )
    return spread(*arrays)[: query.shape[0]]
