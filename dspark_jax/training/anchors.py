"""Anchors: where blocks start in a training text, and what their slots should predict.

An anchor is a token that the target wrote and whose successor it wrote too. N anchors
per sequence are drawn without replacement; slot k of a block at anchor a predicts the
token at a + 1 + k (paper section 3.3; DeepSpec's conventions).
"""

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dspark_jax import checks


class Anchors(flax.struct.PyTreeNode):
    """N anchors per sequence, ascending; unused ones are dummies at the end."""

    positions: jax.Array  # int32 [B, A], 0 for dummies
    keep: jax.Array  # bool [B, A], False for dummies
    sizes: jax.Array | None = None  # int32 [B, A], slots of each block; None: all K


class Blocks(flax.struct.PyTreeNode):
    """What the slots of every block get and should give."""

    inputs: jax.Array  # int32 [B, A, K], (anchor, mask, ..., mask); dummies all mask
    positions: jax.Array  # int32 [B, A, K], absolute: anchor + k
    previous: (
        jax.Array
    )  # int32 [B, A, K], the token before each label (teacher forcing)
    labels: jax.Array  # int32 [B, A, K], the token at anchor + 1 + k
    label_positions: jax.Array  # int32 [B, A, K], clipped to the sequence
    is_supervised: jax.Array  # bool [B, A, K], a contiguous prefix of every block
    is_present: jax.Array | None = None  # bool [B, A, K], slots that exist; None: all


def candidates(loss_mask: Bool[Array, "B S"]) -> Bool[Array, "B S-1"]:
    """Positions that may be anchors: they and their successor are supervised."""
    return loss_mask[:, :-1] & loss_mask[:, 1:]


def sample(
    key: jax.Array,
    loss_mask: Bool[Array, "B S"],
    num_anchors: int,
    *,
    sizes: tuple[int, int] | None = None,
) -> Anchors:
    """Draws `num_anchors` anchors per sequence, uniformly without replacement.

    Args:
      key: one typed key.
      loss_mask: tokens that the target wrote.
      num_anchors: A; a sequence with fewer candidates gets dummies.
      sizes: shortest and longest block; every block draws its own. None: all whole.

    Raises:
      TypeError: `loss_mask` is not boolean.
    """
    checks.check_rank("loss_mask", loss_mask, "B S")
    if loss_mask.dtype != jnp.bool_:
        raise TypeError(f"`loss_mask` must hold booleans, got {loss_mask.dtype}")
    allowed = candidates(loss_mask)
    length = allowed.shape[1]
    # The num_anchors largest of independent uniform keys are a uniform subset.
    draws = jax.random.uniform(key, allowed.shape, jnp.float32)
    draws = jnp.where(allowed, draws, -1.0)
    chosen, positions = jax.lax.top_k(draws, min(num_anchors, length))
    # `length` sorts behind every position.
    positions = jnp.sort(jnp.where(chosen >= 0, positions, length), axis=-1)
    missing = num_anchors - positions.shape[1]
    positions = jnp.pad(positions, ((0, 0), (0, missing)), constant_values=length)
    keep = positions < length
    drawn = None
    if sizes is not None:
        size_key = jax.random.fold_in(key, 1)
        drawn = jax.random.randint(size_key, keep.shape, sizes[0], sizes[1] + 1)
    positions = jnp.where(keep, positions, 0).astype(jnp.int32)
    return Anchors(positions=positions, keep=keep, sizes=drawn)


def everywhere(loss_mask: Bool[Array, "B S"]) -> Anchors:
    """A block at every candidate; position S - 1 is always a dummy."""
    keep = jnp.pad(candidates(loss_mask), ((0, 0), (0, 1)))
    index = jnp.arange(keep.shape[1], dtype=jnp.int32)[None]
    return Anchors(positions=jnp.where(keep, index, 0), keep=keep)


def round_starts(
    accept: Float[Array, "B S K"], loss_mask: Bool[Array, "B S"]
) -> Float[Array, "B S"]:
    """The chance that a round of decoding begins at each position of the text.

    A text drawn from the target is what `token` decoding writes; given the text, draft
    k of a round is accepted with probability min(1, p(y)/q(y)) of its token y. The
    first round's anchor is the first token of an answer, and a round that accepts j
    drafts at t makes t + j + 1 the next anchor:
    s_t = first_t + sum_j s_{t-j-1} P(j accepted | t - j - 1).

    Args:
      accept: of every slot of the block at every position (`everywhere`), 0 on slots
        that are not supervised.
    """
    keep = jnp.pad(candidates(loss_mask), ((0, 0), (0, 1)))
    previous = jnp.pad(loss_mask[:, :-1], ((0, 0), (1, 0)))
    is_first = (loss_mask & ~previous).astype(jnp.float32)
    survival = jnp.cumprod(accept, axis=-1)
    reached = jnp.concatenate(
        [jnp.ones_like(survival[..., :1]), survival[..., :-1]], axis=-1
    )
    # P(j accepted): all before slot j survive, slot j does not; or all K survive.
    ends = jnp.concatenate([reached * (1 - accept), survival[..., -1:]], axis=-1)

    def step(pending, inputs):  # pending[:, i]: chance that a round begins at t + i
        first, kept, end = inputs
        start = jnp.where(kept, jnp.minimum(first + pending[:, 0], 1.0), 0.0)
        pending = jnp.pad(pending[:, 1:], ((0, 0), (0, 1))) + start[:, None] * end
        return pending, start

    by_position = [jnp.swapaxes(x, 0, 1) for x in (is_first, keep, ends)]
    zeros = jnp.zeros((accept.shape[0], accept.shape[2] + 1), jnp.float32)
    _, starts = jax.lax.scan(step, zeros, tuple(by_position))
    return jax.lax.stop_gradient(starts.T)


def make_blocks(
    tokens: Int[Array, "B S"],
    loss_mask: Bool[Array, "B S"],
    anchors: Anchors,
    *,
    block_size: int,
    mask_token: int,
) -> Blocks:
    """Inputs, labels and supervision of all blocks.

    A slot is supervised while its label lies inside the sequence and was written by the
    target, and so do and were all labels before it in the block.
    """
    length = tokens.shape[1]
    offsets = jnp.arange(block_size, dtype=jnp.int32)[None, None, :]
    positions = anchors.positions[..., None] + offsets  # [B, A, K]
    wanted = positions + 1
    label_positions = jnp.minimum(wanted, length - 1)
    label_positions = jnp.where(anchors.keep[..., None], label_positions, 0)
    labels = _gather(tokens, label_positions)
    supervised = _gather(loss_mask, label_positions) & (wanted < length)
    supervised = supervised & anchors.keep[..., None]
    is_present = None
    if anchors.sizes is not None:
        is_present = offsets < anchors.sizes[..., None]
        supervised = supervised & is_present
    anchor_tokens = _gather(tokens, anchors.positions[..., None])  # [B, A, 1]
    is_first = (offsets == 0) & anchors.keep[..., None]
    return Blocks(
        inputs=jnp.where(is_first, anchor_tokens, mask_token).astype(jnp.int32),
        positions=positions,
        previous=jnp.concatenate([anchor_tokens, labels[..., :-1]], axis=-1),
        labels=labels,
        label_positions=label_positions,
        is_supervised=jnp.cumprod(supervised.astype(jnp.int32), axis=-1) > 0,
        is_present=is_present,
    )


def visible(anchors: Anchors, length: int) -> Bool[Array, "B A S"]:
    """Context that a block sees: strictly before its anchor, not its own."""
    index = jnp.arange(length, dtype=jnp.int32)[None, None, :]
    return index < anchors.positions[..., None]


def target_rows(
    hidden: Float[Array, "B S D"], blocks: Blocks
) -> Float[Array, "B A K D"]:
    """The target's hidden states that predict the labels: those at label - 1."""
    index = jnp.maximum(blocks.label_positions - 1, 0)
    batch, num_anchors, block_size = index.shape
    flat = index.reshape(batch, num_anchors * block_size, 1)
    rows = jnp.take_along_axis(hidden, flat, axis=1, mode="clip")
    return rows.reshape(batch, num_anchors, block_size, hidden.shape[-1])


def _gather(values: jax.Array, positions: jax.Array) -> jax.Array:
    batch = positions.shape[0]
    flat = positions.reshape(batch, -1)
    return jnp.take_along_axis(values, flat, axis=1, mode="clip").reshape(
        positions.shape
    )
