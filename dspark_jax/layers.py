"""Layers of the Llama/Qwen3 family as pure functions, shared by targets and drafters.

All matrices are stored [out, in], as checkpoints have them. In float32 all products ask
for true float32 (no tf32), because the target's one-row and W-row passes must agree.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dspark_jax import config as config_lib
from dspark_jax import products
from dspark_jax.config import BlockConfig, RopeConfig
from pallas_kernels import products as kernel_products


class BlockParams(flax.struct.PyTreeNode):
    """One transformer block; fields that the config switches off are None.

    Matrices that multiply the same rows are one, their rows one after another
    (`projection_sizes`). Given apart, XLA would join them itself: for few rows inside a
    product, for many by writing the joined matrix at every call (62 us a layer of
    Qwen3-4B on an H200, a sixth of the pass).
    """

    input_norm: jax.Array  # [D]
    qkv: jax.Array  # [(H+2G)*E, D]
    o: jax.Array  # [D, H*E]
    post_norm: jax.Array  # [D]
    gate_up: jax.Array  # [2*F, D]
    down: jax.Array  # [D, F]
    q_norm: jax.Array | None = None  # [E]
    k_norm: jax.Array | None = None  # [E]
    qkv_bias: jax.Array | None = None  # [(H+2G)*E]
    o_bias: jax.Array | None = None  # [D]
    gate_up_bias: jax.Array | None = None  # [2*F]
    down_bias: jax.Array | None = None  # [D]


def projection_sizes(config: BlockConfig) -> dict[str, tuple[int, ...]]:
    """Rows of the parts of each joined matrix: q, k, v and gate, up."""
    queries = config.num_heads * config.head_width
    keys = config.num_kv_heads * config.head_width
    return {"qkv": (queries, keys, keys), "gate_up": (config.ffn_width,) * 2}


def abstract_block(config: BlockConfig, dtype: Any) -> BlockParams:
    """Shapes of one block's parameters."""
    width, ffn = config.width, config.ffn_width
    sizes = projection_sizes(config)

    def array(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    def maybe(present: bool, *shape: int) -> Any:
        return array(*shape) if present else None

    return BlockParams(
        input_norm=array(width),
        qkv=array(sum(sizes["qkv"]), width),
        o=array(width, config.num_heads * config.head_width),
        post_norm=array(width),
        gate_up=array(2 * ffn, width),
        down=array(width, ffn),
        q_norm=maybe(config.qk_norm, config.head_width),
        k_norm=maybe(config.qk_norm, config.head_width),
        qkv_bias=maybe(config.attention_bias, sum(sizes["qkv"])),
        o_bias=maybe(config.output_bias, width),
        gate_up_bias=maybe(config.mlp_bias, 2 * ffn),
        down_bias=maybe(config.mlp_bias, width),
    )


def init_from_abstract(key: jax.Array, abstract: Any, scale: float = 0.02) -> Any:
    """Random parameters: matrices N(0, scale²), fields named `*norm` 1, `*bias` 0."""
    leaves, treedef = jax.tree_util.tree_flatten_with_path(abstract)
    keys = jax.random.split(key, max(len(leaves), 1))
    values = []
    for leaf_key, (path, leaf) in zip(keys, leaves, strict=True):
        name = str(getattr(path[-1], "name", path[-1]))
        if name.endswith("norm"):
            values.append(jnp.ones(leaf.shape, leaf.dtype))
        elif name.endswith("bias"):
            values.append(jnp.zeros(leaf.shape, leaf.dtype))
        else:
            noise = jax.random.normal(leaf_key, leaf.shape, jnp.float32)
            values.append((scale * noise).astype(leaf.dtype))
    return jax.tree_util.tree_unflatten(treedef, values)


def block(
    params: BlockParams,
    config: BlockConfig,
    x: Float[Array, "... W D"],
    positions: Int[Array, "... W"],
    attend: Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]],
    dtype: Any = None,
) -> tuple[Float[Array, "... W D"], Any]:
    """One pre-norm block: x + attention(norm(x)), then + SwiGLU(norm(x)).

    Args:
      x: the residual stream; it keeps its dtype.
      attend: (query [B, W, H, E], key [B, W, G, E], value [B, W, G, E]) -> (output
        [B, W, H, E], aux): what the rows may see is the caller's business.
      dtype: of the rows between norm and sum, if not that of `x`.

    Returns:
      The block's output and `aux` (an updated cache, say).
    """
    normed = rms_norm(x, params.input_norm, config.rms_eps, dtype)
    query, key, value = queries_keys_values(params, config, normed, positions)
    attended, aux = attend(query, key, value)
    flat = attended.reshape(*attended.shape[:-2], -1)  # [B, W, H*E]
    x = x + dot(flat, params.o, params.o_bias, x.dtype)
    normed = rms_norm(x, params.post_norm, config.rms_eps, dtype)
    return x + swiglu(params, normed, x.dtype), aux


# Jitted, like the other parts of a layer below: a program traces and lowers each part
# once and not in every layer (0.4 s instead of 1.2 s for thirty). XLA inlines them.
@functools.partial(jax.jit, static_argnames="config")
def queries_keys_values(
    params: BlockParams, config: BlockConfig, x: jax.Array, positions: jax.Array
) -> tuple[
    Float[Array, "... W H E"], Float[Array, "... W G E"], Float[Array, "... W G E"]
]:
    """Rotated queries and keys, and values, of already normed rows."""
    joined = dot(x, params.qkv, params.qkv_bias)
    first, second, _ = projection_sizes(config)["qkv"]
    query, key, value = jnp.split(joined, (first, first + second), axis=-1)
    query = query.reshape(*x.shape[:-1], config.num_heads, config.head_width)
    if params.q_norm is not None:
        query = rms_norm(query, params.q_norm, config.rms_eps)
    query = rope(query, positions, config.rope)
    return query, *_of_heads(params, config, key, value, positions)


@functools.partial(jax.jit, static_argnames="config")
def keys_values(
    params: BlockParams, config: BlockConfig, x: jax.Array, positions: jax.Array
) -> tuple[Float[Array, "... W G E"], Float[Array, "... W G E"]]:
    """Rotated keys, and values, of already normed rows (or of context features)."""
    first = projection_sizes(config)["qkv"][0]
    bias = None if params.qkv_bias is None else params.qkv_bias[first:]
    key, value = jnp.split(dot(x, params.qkv[first:], bias), 2, axis=-1)
    return _of_heads(params, config, key, value, positions)


def _of_heads(
    params: BlockParams,
    config: BlockConfig,
    key: jax.Array,
    value: jax.Array,
    positions: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    shape = (*key.shape[:-1], config.num_kv_heads, config.head_width)
    key, value = key.reshape(shape), value.reshape(shape)
    if params.k_norm is not None:
        key = rms_norm(key, params.k_norm, config.rms_eps)
    return rope(key, positions, config.rope), value


@functools.partial(jax.jit, static_argnames="dtype")
def swiglu(
    params: BlockParams, x: Float[Array, "... D"], dtype: Any = None
) -> Float[Array, "... D"]:
    """down(silu(gate(x)) * up(x)), the last product in `dtype` (default: x's)."""
    gate, up = jnp.split(dot(x, params.gate_up, params.gate_up_bias), 2, axis=-1)
    return dot(jax.nn.silu(gate) * up, params.down, params.down_bias, dtype)


def rms_norm(
    x: Float[Array, "... D"], gain: Float[Array, "D"], eps: float, dtype: Any = None
) -> Float[Array, "... D"]:
    """x / sqrt(mean(x²) + eps) * gain in `dtype` (x's), the statistics in float32."""
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
    normed = wide * jax.lax.rsqrt(mean_square + jnp.float32(eps))
    normed = normed.astype(dtype or x.dtype)
    return normed * _along_last_axis(gain, normed)


def rope(
    x: Float[Array, "... W N E"], positions: Int[Array, "... W"], config: RopeConfig
) -> Float[Array, "... W N E"]:
    """Rotates pairs (i, i + E/2) of every head by position * frequency_i, in float32.

    Padding rows (position -1) rotate as position 0: they are never read.
    """
    frequencies = rope_frequencies(config, x.shape[-1])
    angles = jnp.maximum(positions, 0).astype(jnp.float32)[..., None]
    angles = angles * _along_last_axis(frequencies, angles)  # [..., W, E/2]
    cos = jnp.cos(angles)[..., None, :]  # [..., W, 1, E/2]
    sin = jnp.sin(angles)[..., None, :]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


def rope_frequencies(config: RopeConfig, head_width: int) -> Float[Array, "half_E"]:
    """Frequencies theta^(-2i/E), float32, rescaled as `config.kind` says."""
    exponents = jnp.arange(0, head_width, 2, dtype=jnp.float32) / head_width
    frequencies = jnp.float32(1.0) / (jnp.float32(config.theta) ** exponents)
    if config.kind == "linear":
        return frequencies / jnp.float32(config.factor)
    if config.kind == "llama3":
        # Wavelengths shorter than `short` are kept, longer than `long` divided by
        # factor, and those between interpolated.
        short = config.original_max_position / config.high_freq_factor
        long = config.original_max_position / config.low_freq_factor
        wavelengths = jnp.float32(2 * jnp.pi) / frequencies
        span = config.high_freq_factor - config.low_freq_factor
        smooth = config.original_max_position / wavelengths - config.low_freq_factor
        smooth = smooth / jnp.float32(span)
        slow = frequencies / jnp.float32(config.factor)
        mixed = (1 - smooth) * slow + smooth * frequencies
        return jnp.where(
            wavelengths > long, slow, jnp.where(wavelengths < short, frequencies, mixed)
        )
    return frequencies


@jax.jit
def grouped_attention(
    query: Float[Array, "B N W H E"],
    segments: Sequence[tuple[jax.Array, jax.Array, jax.Array | None]],
) -> Float[Array, "B N W H E"]:
    """One softmax over several segments of keys, H/G query heads per key head.

    Scores and softmax are float32. A row that sees nothing returns a finite value.

    Args:
      query: N blocks of W rows per request.
      segments: (keys, values, visible) each. Keys and values [B, G, C, E] are shared by
        a request's blocks, [B, N, W', G, E] belong to one block; visible is bool
        [B, N, W, C] (or broadcastable), None = all.
    """
    batch, blocks, rows, heads, width = query.shape
    scores, weighted = [], []
    for keys, values, visible in segments:
        own = keys.ndim == 5
        kv_heads = keys.shape[3] if own else keys.shape[1]
        grouped = query.reshape(batch, blocks, rows, kv_heads, heads // kv_heads, width)
        part = kernel_products.einsum(
            "bnwghe,bncge->bgnhwc" if own else "bnwghe,bgce->bgnhwc", grouped, keys
        )
        part = part * jnp.float32(width**-0.5)
        if visible is not None:
            # finfo.min, not -inf: a row that sees nothing must stay finite.
            floor = jnp.finfo(jnp.float32).min
            part = jnp.where(visible[:, None, :, None], part, floor)
        scores.append(part)
        weighted.append(
            (values, "bgnhwc,bncge->bnwghe" if own else "bgnhwc,bgce->bnwghe")
        )
    sizes = np.cumsum([part.shape[-1] for part in scores])[:-1]
    weights = jax.nn.softmax(jnp.concatenate(scores, axis=-1), axis=-1)
    out = jnp.float32(0)
    for part, (values, spec) in zip(
        jnp.split(weights, sizes, axis=-1), weighted, strict=True
    ):
        out = out + kernel_products.einsum(spec, part.astype(values.dtype), values)
    return out.reshape(query.shape).astype(query.dtype)


def dot(
    x: Float[Array, "... I"],
    weight: Float[Array, "O I"],
    bias: Float[Array, "O"] | None = None,
    dtype: Any = None,
) -> Float[Array, "... O"]:
    """x @ weight.T + bias, operands in x's dtype, the sum in `dtype` (default: x's)."""
    out = products.product(x, weight.astype(x.dtype), dtype or x.dtype)
    return out if bias is None else out + _along_last_axis(bias, out)


def unembed(
    hidden: Float[Array, "... D"], head: Float[Array, "V D"]
) -> Float[Array, "... V"]:
    """Float32 logits: hidden @ head.T."""
    return products.product(hidden, head.astype(hidden.dtype), jnp.float32)


def embed(
    table: Float[Array, "V D"], ids: Int[Array, "..."], dtype: Any
) -> Float[Array, "... D"]:
    """Rows of the embedding table; ids outside the vocabulary are clipped."""
    return jnp.take(table, ids, axis=0, mode="clip").astype(dtype)


def _along_last_axis(vector: jax.Array, like: jax.Array) -> jax.Array:
    """`vector` with leading axes of size 1 and the dtype of `like`, to broadcast."""
    return vector.astype(like.dtype).reshape(*([1] * (like.ndim - 1)), -1)


def dtype_of(name: str) -> Any:
    """The numpy dtype of a configuration's dtype name."""
    if name not in config_lib.DTYPES:
        raise ValueError(f"dtype must be one of {config_lib.DTYPES}, got {name!r}")
    return jnp.dtype(name)
