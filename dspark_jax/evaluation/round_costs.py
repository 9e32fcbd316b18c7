"""What the parts of a round must move and multiply at least: bytes and FLOPs.

Bytes are the weights that a part reads, the keys and values of the context, and logits,
written once by the part that makes them and read once by the one that uses them. The
floor is the longer of bytes / copy bandwidth and FLOPs / matmul peak.
"""

from typing import Any, NamedTuple

import jax

from dspark_jax import layers
from dspark_jax.config import BlockConfig, DecoderConfig, DrafterConfig
from dspark_jax.drafters.dspark import DSparkParams
from dspark_jax.types import PyTree


class Cost(NamedTuple):
    """Bytes by kind, and FLOPs."""

    weights: float = 0.0
    cache: float = 0.0
    logits: float = 0.0
    flops: float = 0.0

    def __add__(self, other: Any) -> "Cost":
        return Cost(*(a + b for a, b in zip(self, other, strict=True)))

    @property
    def bytes(self) -> float:
        return self.weights + self.cache + self.logits

    def floor_ms(self, ceiling: dict[str, float]) -> float:
        """The least time, in ms, under the measured ceilings."""
        by_memory = self.bytes / (ceiling["copy_tb_per_s"] * 1e12)
        by_compute = self.flops / (ceiling["matmul_tflops"] * 1e12)
        return 1e3 * max(by_memory, by_compute)


class Shape(NamedTuple):
    """What a round's cost depends on."""

    batch: int
    context: int  # keys that every row of queries sees
    draft_length: int
    support: int  # logits of a draft row: the (draft) vocabulary
    candidates: int | None


def of_target(config: DecoderConfig, params: PyTree, shape: Shape, width: int) -> Cost:
    """A pass of `width` tokens a request, unembedded, whose logits are written."""
    rows = shape.batch * width
    matrices = [params.layers, params.embed if params.head is None else params.head]
    cost = _products(matrices, rows)
    cost += _attention(config.block, config.num_layers, shape, width, config)
    return cost + Cost(logits=4.0 * rows * config.vocab_size)


def of_draft(
    config: DrafterConfig, params: DSparkParams, head: Any, shape: Shape
) -> Cost:
    """The drafter's pass over a block, whose base logits are written."""
    rows = shape.batch * shape.draft_length
    cost = _products([params.backbone.layers, head], rows)
    cost += _attention(
        config.block, config.num_layers, shape, shape.draft_length, config
    )
    return cost + Cost(logits=4.0 * rows * shape.support)


def of_markov(params: DSparkParams, shape: Shape, w2: Any) -> Cost:
    """K sequential products with W2 and draws; base logits are read once.

    Among candidates the rows of W2 are gathered, N for every slot.
    """
    rows = shape.batch * shape.draft_length
    logits = Cost(logits=4.0 * rows * shape.support)
    if w2 is None:
        return logits
    rank = w2.shape[1]
    if shape.candidates is None:
        read = float(shape.draft_length * _num_bytes(w2))
        return logits + Cost(weights=read, flops=2.0 * rows * w2.size)
    num = rows * shape.candidates * rank
    return logits + Cost(weights=float(num * w2.dtype.itemsize), flops=2.0 * num)


def of_verdict(config: DecoderConfig, shape: Shape, width: int) -> Cost:
    """Sampling, verification and commit: the target's logits are read once."""
    return Cost(logits=4.0 * shape.batch * width * config.vocab_size)


def of_observe(config: DrafterConfig, params: DSparkParams, shape: Shape) -> Cost:
    """Context features and their keys and values, for a whole window."""
    rows = shape.batch * (shape.draft_length + 1)
    block = config.block
    size = 2 * block.num_kv_heads * block.head_width * block.width * config.num_layers
    itemsize = params.backbone.fc.dtype.itemsize
    projections = Cost(weights=float(size * itemsize), flops=2.0 * rows * size)
    return _products(params.backbone.fc, rows) + projections


def _products(matrices: Any, rows: int) -> Cost:
    leaves = [leaf for leaf in jax.tree.leaves(matrices) if leaf is not None]
    size = sum(leaf.size for leaf in leaves if leaf.ndim == 2)
    return Cost(weights=float(sum(map(_num_bytes, leaves))), flops=2.0 * rows * size)


def _attention(
    block: BlockConfig, num_layers: int, shape: Shape, width: int, config: Any
) -> Cost:
    itemsize = layers.dtype_of(config.compute_dtype).itemsize
    pairs = shape.batch * num_layers * shape.context * block.head_width
    return Cost(
        cache=2.0 * pairs * block.num_kv_heads * itemsize,
        flops=4.0 * pairs * block.num_heads * width,
    )


def _num_bytes(array: Any) -> int:
    return array.size * array.dtype.itemsize
