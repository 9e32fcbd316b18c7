"""Draws the tokens of a draft, slot by slot, and says what they were drawn from.

The sampler is handed to `Drafter.propose`: a drafter knows logits, not noise. Verifying
needs of every slot's token its probability q and the `Row` of its distribution.
"""

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dspark_jax import noise
from dspark_jax import sampling as sampling_lib
from dspark_jax.sampling import Sampling
from dspark_jax.types import Row


class Choice(flax.struct.PyTreeNode):
    """A token that was drawn, and what is known of the row it was drawn from."""

    index: jax.Array  # int32 [...], of its logit
    token: jax.Array  # int32 [...]
    largest: jax.Array  # int32 [...], index of the largest logit
    top: jax.Array  # float32 [...], the largest logit; not finite: neither is the row
    row: Row | None


class DraftSampler(flax.struct.PyTreeNode):
    """Draws the tokens of a draft: handed to `Drafter.propose`.

    `draw(slot, logits, ids)` gives the slot's token, its probability and its Row; or
    `choose` tokens alone, and `describe` the probabilities and Rows of all at once.
    Under the "seeded" rule the noise is that of plain decoding at the token's position;
    under the others it belongs to this round alone (`noise.py`).

    A row that is not finite (NaN or +inf anywhere, or no support) becomes a point mass
    on a valid token: the draft is then useless, never wrong.
    """

    key: jax.Array  # typed keys [B]
    anchor_position: jax.Array  # int32 [B]
    sampling: Sampling  # fields [B] or None
    streams: noise.Streams | None  # of ROUND noise; None when it is not used
    draft_length: int = flax.struct.field(pytree_node=False)
    rule: str = flax.struct.field(pytree_node=False, default="token")
    candidates: int | None = flax.struct.field(pytree_node=False, default=None)

    def draw(
        self, slot: int, logits: Float[Array, "B N"], ids: Int[Array, "..."] | None
    ) -> tuple[Int[Array, "B"], Float[Array, "B"], Row]:
        """Draws slot `slot` (0-based) from logits [B, N] of the tokens `ids`.

        Returns the token, its probability q and the Row it was drawn from.
        """
        choice = self.choose(slot, logits, ids)
        return choice.token, *self.describe(logits, choice)

    def choose(
        self, slot: int, logits: Float[Array, "B N"], ids: Int[Array, "..."] | None
    ) -> Choice:
        """The token of slot `slot`, with its Row only if the draw needed one.

        Only cuts need it: argmax(logits - top + T G) knows no normaliser, and what must
        be done slot by slot is the shorter for it. A row that is not finite is drawn
        uniformly, or at temperature 0 is its first token.
        """
        batch, support = logits.shape
        if ids is None:
            ids = jnp.arange(support, dtype=jnp.int32)
        ids = jnp.broadcast_to(ids, (batch, support))
        temperature = self.sampling.temperature
        largest, top = sampling_lib.largest_logit(logits)
        is_finite = jnp.isfinite(top)
        row = None
        if temperature is None:
            index = jnp.where(is_finite, largest, 0)
        else:
            logits = jnp.where(is_finite[:, None], logits, 0.0)
            if self.rule == "seeded":
                position = self.anchor_position + slot + 1
                gumbel = noise.token_gumbel(self.key, position, ids)
            else:
                assert self.streams is not None
                gumbel = noise.round_gumbel(self.streams, slot, ids)
            finite_top = jnp.where(is_finite, top, 0.0)
            perturbed = sampling_lib.perturb(logits, finite_top, temperature, gumbel)
            if sampling_lib.has_cuts(self.sampling):
                row = sampling_lib.make_row(logits, self.sampling)
                scaled = sampling_lib.scale(logits, row.top, temperature)
                is_kept = scaled >= row.cut[..., None]
                perturbed = jnp.where(is_kept, perturbed, -jnp.inf)
            index = jnp.argmax(perturbed, axis=-1).astype(jnp.int32)
        token = jnp.take_along_axis(ids, index[:, None], axis=1)[:, 0]
        return Choice(index=index, token=token, largest=largest, top=top, row=row)

    def describe(
        self, logits: Float[Array, "B ... N"], choice: Choice
    ) -> tuple[Float[Array, "B ..."], Row]:
        """q of the tokens that were chosen from these logits, and their Rows."""
        settings, token, row = self.sampling, choice.token, choice.row
        if settings.temperature is None:
            zeros = jnp.zeros(token.shape, jnp.float32)
            return zeros + 1.0, Row(
                top=zeros, cut=zeros - jnp.inf, log_normaliser=zeros, point=token
            )
        one = (1,) * (token.ndim - 1)
        settings = jax.tree.map(lambda x: x.reshape(-1, *one), settings)
        if row is None:
            row = sampling_lib.make_row(logits, settings, (choice.largest, choice.top))
        is_finite = jnp.isfinite(choice.top)
        row = Row(
            top=row.top,
            cut=jnp.where(is_finite, row.cut, -jnp.inf),
            log_normaliser=jnp.where(is_finite, row.log_normaliser, 0.0),
            point=jnp.where((row.point >= 0) | ~is_finite, token, -1),
        )
        logit = jnp.take_along_axis(logits, choice.index[..., None], axis=-1)
        q = sampling_lib.probability(logit, token[..., None], row, settings.temperature)
        return q[..., 0], row


def make_draft_sampler(
    key: jax.Array,
    anchor_position: Int[Array, "B"],
    sampling: Sampling,
    *,
    draft_length: int,
    rule: str,
    candidates: int | None = None,
) -> DraftSampler:
    """The sampler of one round's draft."""
    uses_round_noise = sampling.temperature is not None and rule != "seeded"
    streams = None
    if uses_round_noise:
        streams = noise.round_streams(key, anchor_position, draft_length, noise.DRAFT)
    return DraftSampler(
        key=key,
        anchor_position=anchor_position,
        sampling=sampling,
        streams=streams,
        draft_length=draft_length,
        rule=rule,
        candidates=candidates,
    )
