"""What the target makes of a batch of texts: its hidden states and tapped layers.

The pass runs over whole rows at once, so no keys and values are stored. Taps have norms
that differ by an order of magnitude between layers, and DeepSpec's layout has no norm
for each of them: training multiplies every tap by a constant, which `fold_tap_scale`
moves into fc afterwards, without changing the function.
"""

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from dspark_jax import layers
from dspark_jax.drafters import dspark
from dspark_jax.types import PyTree, Target
from pallas_kernels import anchor_attention


class Batch(flax.struct.PyTreeNode):
    """Texts; one conversation a row. A leading axis [U] makes U micro-steps of them."""

    tokens: jax.Array  # int32 [B, S]
    loss_mask: jax.Array  # bool [B, S], tokens that the target wrote


class TargetStates(flax.struct.PyTreeNode):
    """What the target makes of a batch; from its pass, or from a cache."""

    taps: jax.Array  # [B, S, M*D], raw layer outputs
    hidden: jax.Array  # [B, S, D], after the final norm


def compute(
    target: Target,
    target_params: PyTree,
    batch: Batch,
    tap_layers: tuple[int, ...],
    attention: str = "auto",
) -> TargetStates:
    """Runs the target over whole rows.

    Args:
      tap_layers: as in `DrafterConfig`.
      attention: as in `TrainConfig`; `attends_rows` says what becomes of it.
    """
    rows, length = batch.tokens.shape
    positions = jnp.broadcast_to(
        jnp.arange(length, dtype=jnp.int32)[None], (rows, length)
    )
    hidden, taps, _ = target.forward(
        target_params,
        batch.tokens,
        positions,
        WholeRows(attention),
        tap_layers=tap_layers,
    )
    assert taps is not None  # there is at least one tapped layer
    return jax.lax.stop_gradient(TargetStates(taps=taps, hidden=hidden))


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class WholeRows:
    """A cache that keeps nothing: every row is there at once, position = index."""

    implementation: str = "auto"

    def attend(self, layer, query, key, value, positions):
        """Causal attention among the given rows."""
        del layer, positions
        if attends_rows(self.implementation, query, key) == "cudnn":
            out = jax.nn.dot_product_attention(
                query, key, value, is_causal=True, implementation="cudnn"
            )
            return out, self
        length = query.shape[1]
        index = jnp.arange(length, dtype=jnp.int32)
        seen = index[None, :] <= index[:, None]  # [S, S]
        segment = (jnp.swapaxes(key, 1, 2), jnp.swapaxes(value, 1, 2), seen[None, None])
        return layers.grouped_attention(query[:, None], [segment])[:, 0], self


def attends_rows(implementation: str, query: Any, key: Any) -> str:
    """Who attends whole rows: "xla" or "cudnn" (2.5x as fast on an H200).

    Args:
      implementation: as in `TrainConfig`. A kernel for blocks comes with cuDNN for
        rows where that can run them, and so does "auto" on a machine that has it.
      query: [B, S, H, E]; only its width and dtype are read.
      key: likewise.
    """
    if implementation in ("xla", "cudnn"):
        return implementation
    if implementation == "auto" and anchor_attention.unavailable("cudnn") is not None:
        return "xla"
    is_refused = anchor_attention.supports("cudnn", query, key) is not None
    return "xla" if is_refused else "cudnn"


def measure_tap_scale(states: TargetStates, num_taps: int) -> tuple[float, ...]:
    """About 1 / rms of every tapped layer, without position 0 (its norm is an outlier).

    Rounded to powers of two: scaling is then exact in every dtype, and so is
    `fold_tap_scale`. Reads the values: for the host, not under a trace.
    """
    taps = states.taps[:, 1:].astype(jnp.float32)
    taps = taps.reshape(*taps.shape[:-1], num_taps, -1)
    scale = jax.lax.rsqrt(jnp.mean(taps * taps, axis=(0, 1, 3)))
    return tuple(float(x) for x in 2.0 ** np.round(np.log2(np.asarray(scale))))


def scale_taps(taps: Float[Array, "... MD"], tap_scale: tuple[float, ...]) -> jax.Array:
    """Multiplies each tapped layer by its factor."""
    if not tap_scale:
        return taps
    return taps * _tap_factors(tap_scale, taps.shape[-1], taps.dtype).reshape(
        *[1] * (taps.ndim - 1), -1
    )


def fold_tap_scale(
    params: dspark.DSparkParams, tap_scale: tuple[float, ...]
) -> dspark.DSparkParams:
    """The same function of the raw taps: the factors moved into the columns of fc."""
    if not tap_scale:
        return params
    fc = params.backbone.fc
    factors = _tap_factors(tap_scale, fc.shape[1], fc.dtype)
    body = dataclasses.replace(params.backbone, fc=fc * factors[None])
    return dataclasses.replace(params, backbone=body)


def _tap_factors(tap_scale: tuple[float, ...], size: int, dtype: Any) -> jax.Array:
    if size % len(tap_scale):
        raise ValueError(
            f"`tap_scale` must have one factor a tapped layer, got {len(tap_scale)} "
            f"for {size} features"
        )
    return jnp.repeat(jnp.asarray(tap_scale, dtype), size // len(tap_scale))
