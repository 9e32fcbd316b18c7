"""Verification: which drafts stand, and which token follows. Three lossless rules.

With p the target's and q the drafter's sampling distribution of a slot (same
temperature and cuts), x_k the drafts and l the request's verify length:

  token   accept x_k while u_k q(x_k) < p(x_k); next ~ max(p - q, 0) after a rejection,
          next ~ p after l acceptances (rejection sampling, paper eq. 2).
  block   accept whole prefixes jointly (arXiv 2403.10444): per round never shorter in
          expectation than `token`.
  seeded  the target draws with plain decoding's noise; accept while equal (arXiv
          2408.07978). The words do not depend on the drafter at all.

At temperature 0 all three are argmax equality. All arithmetic that decides is float32.

A row of target logits that is not finite fails its request where plain decoding fails:
when the text reaches it. It ends the window before it (row j is a function of
x_1 .. x_j, so that the window stays predictable, and the accepted prefix keeps its
law); the request fails if all drafts up to there stand, and otherwise never gets there.
A NaN from inside a layer fails earlier: attention that masks by weight (0 * NaN)
spreads it over all rows of the request's pass.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dspark_jax import noise, sampling
from dspark_jax.paged_cache import RowLayout
from dspark_jax.sampling import Sampling
from dspark_jax.types import Draft, Row, Verification


def verify(
    key: jax.Array,
    anchor_position: Int[Array, "B"],
    draft: Draft,
    target_logits: Float[Array, "B W V"] | Float[Array, "T V"],
    target_row: Row,
    verify_length: Int[Array, "B"],
    settings: Sampling,
    *,
    rule: str,
    commit_length: Int[Array, "B"] | None = None,
    layout: RowLayout | None = None,
) -> Verification:
    """Verifies a draft against the target's logits.

    Args:
      key: typed keys [B].
      anchor_position: absolute; with `key` it keys this round's noise.
      draft: K slots.
      target_logits: W = K + 1 rows; row k follows the anchor and k drafts.
      target_row: sampling distributions [B, W] of `target_logits`.
      verify_length: l in 0..K. Rows and slots beyond it are ignored, as are those
        beyond the first row that is not finite.
      settings: fields [B], or None.
      rule: "token", "block" or "seeded".
      commit_length: commit at most this many drafts though `verify_length` were
        verified ("cap-accept"): the law is that of a window of this length.
      layout: the target's rows are packed, `target_logits` [T, V] and `target_row` [T];
        this says whose they are. None: [B, W, ...].
    """
    num_slots = draft.tokens.shape[1]
    target_logits = target_logits.astype(jnp.float32)
    row_is_finite = sampling.has_distribution(target_logits)
    if layout is not None:
        row_is_finite = layout.unpack(row_is_finite, True)
    leading = jnp.cumprod(row_is_finite, axis=-1, dtype=jnp.int32)
    leading = jnp.sum(leading, axis=-1, dtype=jnp.int32)
    verify_length = jnp.minimum(verify_length, leading)
    if settings.temperature is None or rule == "seeded":
        tokens = _target_tokens(
            key, anchor_position, target_logits, target_row, settings, layout
        )
        is_equal = tokens[:, :-1] == draft.tokens
        num_accepted = _leading(is_equal, verify_length)
        if commit_length is not None:
            num_accepted = jnp.minimum(num_accepted, commit_length)
        return Verification(
            num_accepted=num_accepted,
            next_token=_take(tokens, num_accepted),
            is_finite=_take(row_is_finite, num_accepted),
        )
    streams = noise.round_streams(key, anchor_position, num_slots, noise.ACCEPT)
    bounds = make_bounds(
        draft,
        target_logits,
        target_row,
        verify_length,
        settings,
        rule=rule,
        layout=layout,
    )
    is_passed = bounds.passes(noise.round_uniform(streams))
    num_accepted = count_accepted(is_passed, verify_length, rule=rule)
    window = verify_length
    if commit_length is not None:
        window = jnp.minimum(verify_length, commit_length)
        num_accepted = jnp.minimum(num_accepted, window)
    mass = next_token_mass(
        draft,
        target_logits,
        target_row,
        bounds,
        num_accepted,
        window,
        settings,
        layout=layout,
    )
    ids = jnp.broadcast_to(jnp.arange(mass.shape[-1], dtype=jnp.int32), mass.shape)
    streams = noise.round_streams(key, anchor_position, 1, noise.RESAMPLE)
    gumbel = noise.round_gumbel(streams, 0, ids)
    next_token = jnp.argmax(jnp.log(mass) + gumbel, axis=-1).astype(jnp.int32)
    return Verification(
        num_accepted=num_accepted,
        next_token=next_token,
        is_finite=_take(row_is_finite, num_accepted),
    )


class Bounds(NamedTuple):
    """What the acceptance uniforms are tested against, and the residual's weights."""

    numerator: jax.Array  # float32 [B, K]
    denominator: jax.Array  # float32 [B, K]
    weight: jax.Array  # float32 [B, K], w_0 .. w_{K-1}; 1 under "token"

    def passes(self, uniform: Float[Array, "B K"]) -> Bool[Array, "B K"]:
        """Slot k passes if u_k * denominator < numerator (strict, no division)."""
        return uniform * self.denominator < self.numerator


def make_bounds(
    draft: Draft,
    target_logits: Float[Array, "B W V"] | Float[Array, "T V"],
    target_row: Row,
    verify_length: Int[Array, "B"],
    settings: Sampling,
    *,
    rule: str,
    layout: RowLayout | None = None,
) -> Bounds:
    """The bounds of the rules "token" and "block" for a draft (see `Bounds`)."""
    p_drafted = _drafted_probability(draft, target_logits, target_row, settings, layout)
    if rule == "token":
        return Bounds(p_drafted, draft.probability, jnp.ones_like(p_drafted))
    return _block_bounds(
        draft, target_logits, target_row, p_drafted, verify_length, settings, layout
    )


def count_accepted(
    is_passed: Bool[Array, "B K"], verify_length: Int[Array, "B"], *, rule: str
) -> Int[Array, "B"]:
    """Drafts accepted: up to the first failure ("token"), or the last to pass."""
    if rule == "token":
        return _leading(is_passed, verify_length)
    slots = jnp.arange(1, is_passed.shape[1] + 1, dtype=jnp.int32)[None]
    stands = is_passed & (slots <= verify_length[:, None])
    return jnp.max(jnp.where(stands, slots, 0), axis=1)


def next_token_mass(
    draft: Draft,
    target_logits: Float[Array, "B W V"] | Float[Array, "T V"],
    target_row: Row,
    bounds: Bounds,
    num_accepted: Int[Array, "B"],
    window: Int[Array, "B"],
    settings: Sampling,
    *,
    layout: RowLayout | None = None,
) -> Float[Array, "B V"]:
    """The next token's law, up to a factor: p after a whole window, else the residual.

    `window` is the number of drafts that could have been committed.
    """
    p = _row_probability(target_logits, target_row, num_accepted, settings, layout)
    slot = jnp.minimum(num_accepted, draft.tokens.shape[1] - 1)
    q = draft_probability(draft, slot, settings, p.shape[-1])
    residual = jnp.maximum(_take(bounds.weight, slot)[:, None] * p - q, 0.0)
    is_whole = num_accepted >= window
    # A residual that rounds to nothing has (almost) no mass to be drawn with.
    is_empty = jnp.sum(residual, axis=-1) <= 0
    return jnp.where((is_whole | is_empty)[:, None], p, residual)


def draft_probability(
    draft: Draft, slot: Int[Array, "B"], settings: Sampling, vocab_size: int
) -> Float[Array, "B V"]:
    """q of one slot per request over the whole vocabulary."""
    logits = _take(draft.logits, slot)  # [B, N]
    row = jax.tree.map(lambda x: _take(x, slot), draft.row)
    ids = draft.ids
    if ids is not None and ids.ndim == 3:
        ids = _take(ids, slot)
    batch, support = logits.shape
    tokens = jnp.arange(support, dtype=jnp.int32) if ids is None else ids
    tokens = jnp.broadcast_to(tokens, (batch, support))
    q = sampling.probability(logits, tokens, row, settings.temperature)
    if ids is None:
        return q
    request = jnp.arange(batch, dtype=jnp.int32)[:, None]
    return jnp.zeros((batch, vocab_size), jnp.float32).at[request, tokens].set(q)


def _target_tokens(
    key: jax.Array,
    anchor_position: jax.Array,
    logits: jax.Array,
    row: Row,
    settings: Sampling,
    layout: RowLayout | None,
) -> jax.Array:
    """What plain decoding draws at every row of the window, int32 [B, W]."""
    if settings.temperature is None:
        return row.point if layout is None else layout.unpack(row.point, 0)
    ids = jnp.arange(logits.shape[-1], dtype=jnp.int32)
    if layout is not None:
        request = jnp.minimum(layout.request, key.shape[0] - 1)
        position = anchor_position[request] + 1 + layout.offset
        gumbel = noise.token_gumbel(key[request], position, ids[None])
        tokens = sampling.draw(logits, row, settings.temperature[request], gumbel)
        return layout.unpack(tokens, 0)
    offset = jnp.arange(1, logits.shape[1] + 1, dtype=jnp.int32)[None]
    gumbel = noise.token_gumbel(key, anchor_position[:, None] + offset, ids[None, None])
    return sampling.draw(logits, row, settings.temperature[:, None], gumbel)


def _block_bounds(
    draft: Draft,
    logits: jax.Array,
    row: Row,
    p_drafted: jax.Array,
    verify_length: jax.Array,
    settings: Sampling,
    layout: RowLayout | None,
) -> Bounds:
    """Block verification.

    w_0 = 1,  w_k = min(1, w_{k-1} p_k(x_k) / q_k(x_k)),
    R_k = sum_v max(w_k p_{k+1}(v) - q_{k+1}(v), 0);
    prefix k < l passes if u_k (R_k + 1 - w_k) < R_k, prefix l if u_l < w_l; the largest
    that passes is accepted. P(accepted >= k | x_1..x_k) = w_k.
    """
    batch, length = p_drafted.shape
    weight = jnp.ones((batch,), jnp.float32)
    numerators, denominators, weights = [], [], []
    for k in range(1, length + 1):
        weights.append(weight)
        q = draft.probability[:, k - 1]
        ratio = weight * p_drafted[:, k - 1]
        # A draft without mass in p never stands, also where q is reported as 0.
        most = (ratio > 0).astype(jnp.float32)
        weight = jnp.where(ratio >= q, most, ratio / jnp.where(q > 0, q, 1.0))
        numerator, denominator = weight, jnp.ones_like(weight)
        if k < length:
            # One slot at a time: no [B, K, V] array of probabilities is alive.
            slot = jnp.full((batch,), k, jnp.int32)
            p_next = _row_probability(logits, row, slot, settings, layout)
            q_next = draft_probability(draft, slot, settings, p_next.shape[-1])
            residual = jnp.maximum(weight[:, None] * p_next - q_next, 0.0)
            mass = jnp.sum(residual, axis=-1)
            is_inside = verify_length > k
            numerator = jnp.where(is_inside, mass, numerator)
            denominator = jnp.where(is_inside, mass + 1.0 - weight, denominator)
        numerators.append(numerator)
        denominators.append(denominator)
    return Bounds(
        numerator=jnp.stack(numerators, axis=1),
        denominator=jnp.stack(denominators, axis=1),
        weight=jnp.stack(weights, axis=1),
    )


def _drafted_probability(
    draft: Draft,
    logits: jax.Array,
    row: Row,
    settings: Sampling,
    layout: RowLayout | None,
) -> jax.Array:
    """p of every drafted token, float32 [B, K]."""
    tokens = draft.tokens[..., None]
    if layout is None:
        drafted = jnp.take_along_axis(logits[:, :-1], tokens, axis=-1)  # [B, K, 1]
        rows = jax.tree.map(lambda x: x[:, :-1], row)
    else:
        at = jnp.minimum(layout.rows[:, :-1], logits.shape[0] - 1)  # [B, K]
        drafted = logits[at[..., None], tokens]
        rows = jax.tree.map(lambda x: x[at], row)
    temperature = None
    if settings.temperature is not None:
        temperature = settings.temperature[:, None]
    return sampling.probability(drafted, tokens, rows, temperature)[..., 0]


def _row_probability(
    logits: jax.Array,
    row: Row,
    index: jax.Array,
    settings: Sampling,
    layout: RowLayout | None,
) -> jax.Array:
    """p of one row of the window per request, float32 [B, V]."""
    if layout is None:
        chosen = _take(logits, index)
        row = jax.tree.map(lambda x: _take(x, index), row)
    else:
        at = jnp.minimum(_take(layout.rows, index), logits.shape[0] - 1)
        chosen, row = logits[at], jax.tree.map(lambda x: x[at], row)
    ids = jnp.broadcast_to(jnp.arange(chosen.shape[-1], dtype=jnp.int32), chosen.shape)
    return sampling.probability(chosen, ids, row, settings.temperature)


def _leading(is_accepted: jax.Array, verify_length: jax.Array) -> jax.Array:
    """Number of leading Trues within the window, int32 [B]."""
    slots = jnp.arange(is_accepted.shape[1], dtype=jnp.int32)[None]
    stands = is_accepted & (slots < verify_length[:, None])
    # The dtype is given because an x64 sum of int32 is int64.
    leading = jnp.cumprod(stands, axis=1, dtype=jnp.int32)
    return jnp.sum(leading, axis=1, dtype=jnp.int32)


def _take(array: jax.Array, index: jax.Array) -> jax.Array:
    """array[b, index[b]]."""
    expanded = index.reshape(-1, *([1] * (array.ndim - 1)))
    return jnp.take_along_axis(array, expanded, axis=1)[:, 0]
