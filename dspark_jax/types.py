"""The contracts between the parts: Target, Drafter and what passes between them.

No algorithm lives here: properties read fields. Dimension key: B requests, K draft
positions, W verify window, V vocabulary, N support of a draft row (the whole
vocabulary, a draft vocabulary or a few candidates), D width, M tapped layers.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Bound:
    """A function with its leading static arguments, equal by value.

    `functools.partial` objects compare by identity and would retrace a jitted program
    after a second `load_target`; two `Bound`s of the same function and equal arguments
    are equal and hash alike.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]

    def __call__(self, *args, **kwargs):
        return self.function(*self.arguments, *args, **kwargs)


class Target(NamedTuple):
    """A language model as pure functions; hashable, equal by value, static under jit.

    Attributes:
      config: has at least `vocab_size` (the true one), `width`, `num_layers`,
        `max_position`, `stop_tokens` and `fingerprint`.
      init_cache: (batch, capacity) -> cache, an opaque pytree.
      forward: (params, tokens [B, W], positions [B, W], cache, *, tap_layers=()) ->
        (hidden [B, W, D] after the final norm, taps [B, W, M*D] or None, cache).
      unembed: (params, hidden [..., D]) -> float32 logits [..., V], cropped to the true
        vocabulary.
      embed: (params, ids [...]) -> [..., D].

    The laws that make a model a Target are `dspark_jax.testing.check_target`.
    """

    config: Any
    init_cache: Callable[..., PyTree]
    forward: Callable[..., tuple[jax.Array, jax.Array | None, PyTree]]
    unembed: Callable[[PyTree, jax.Array], jax.Array]
    embed: Callable[[PyTree, jax.Array], jax.Array]


class Drafter(NamedTuple):
    """A block drafter as pure functions; hashable, equal by value, static under jit.

    Attributes:
      config: has at least `block_size`, `tap_layers` and `target_fingerprint`.
      init_state: (batch, capacity) -> state, an opaque pytree.
      observe: (params, state, tokens [B, W], positions [B, W], taps [B, W, M*D]) ->
        state. Rows of committed tokens only, position -1 elsewhere.
      propose: (params, target_params, state, anchor [B], position [B], sampler) ->
        (Draft, state). `position` is the anchor's; `sampler` (a
        `draft_sampler.DraftSampler`) draws each slot's token and carries the static
        draft length.
    """

    config: Any
    init_state: Callable[..., PyTree]
    observe: Callable[..., PyTree]
    propose: Callable[..., tuple["Draft", PyTree]]


class Row(flax.struct.PyTreeNode):
    """A sampling distribution over logits, in a form that is evaluated pointwise.

    With s(v) = (logit(v) - top) / T: p(v) = exp(s(v) - log_normaliser) where
    s(v) >= cut, else 0. Subtracting the largest logit first keeps p exact at a small T.
    A row with `point` >= 0 is instead the point mass on that token (temperature 0, or a
    draft row that was not finite).
    """

    top: jax.Array  # float32 [...], the largest logit
    cut: jax.Array  # float32 [...], on s
    log_normaliser: jax.Array  # float32 [...]
    point: jax.Array  # int32 [...], -1 = not a point mass


class Draft(flax.struct.PyTreeNode):
    """One drafted block, and everything needed to evaluate its distribution q.

    Slot k (0-based) predicts the token at the anchor's position + k + 1.
    """

    tokens: jax.Array  # int32 [B, K]
    probability: jax.Array  # float32 [B, K], q of the drawn token
    logits: jax.Array  # float32 [B, K, N], after the Markov head
    ids: (
        jax.Array | None
    )  # int32 [B, K, N] or [N]: token of each logit; None: v = index
    row: Row  # [B, K]
    confidence_logits: jax.Array | None  # float32 [B, K]
    length: jax.Array | None = None  # int32 [B], slots offered; None = all K


class Verification(flax.struct.PyTreeNode):
    """What the target made of a draft."""

    num_accepted: jax.Array  # int32 [B], drafts accepted by the rule
    next_token: jax.Array  # int32 [B], drawn after the last accepted draft
    is_finite: jax.Array  # bool [B]; False: no next token, its logits are not finite


class Stats(flax.struct.PyTreeNode):
    """Counts of one generation, per request, from which the benchmarks are made.

    `accepted_length` (τ) is `sum(accepted_sum) / sum(num_rounds)`.
    """

    num_rounds: jax.Array  # int32 [B]
    num_verified: jax.Array  # int32 [B], drafts sent to the target
    num_accepted: jax.Array  # int32 [B], drafts accepted
    accepted_sum: jax.Array  # int32 [B], accepted + 1 a round, + 0 if a stop ended it
    verified_at: jax.Array  # int32 [B, K], rounds that verified slot k
    reached_at: jax.Array  # int32 [B, K], verified slot k, all before it accepted
    accepted_at: jax.Array  # int32 [B, K], rounds that accepted slot k

    @property
    def accepted_length(self) -> jax.Array:
        """τ pooled over the batch: mean of accepted + 1 over all rounds, float32 []."""
        rounds = self.num_rounds.sum().astype("float32")
        return self.accepted_sum.sum().astype("float32") / jnp.maximum(rounds, 1)


class Logprobs(flax.struct.PyTreeNode):
    """Log-probabilities of the generated tokens; 0 elsewhere."""

    raw: jax.Array  # float32 [B, C], log softmax of the target's logits
    sampling: jax.Array  # float32 [B, C], after temperature and truncation


class DecodeState(flax.struct.PyTreeNode):
    """A batch of sequences between rounds.

    Invariant: the anchor is the token at `lengths - 1`; both caches hold exactly the
    positions 0 .. lengths - 2.
    """

    key: jax.Array  # typed keys [B]
    tokens: jax.Array  # int32 [B, C]
    lengths: jax.Array  # int32 [B], known tokens, prompt included
    limits: jax.Array  # int32 [B], lengths never exceed these
    finish: jax.Array  # int32 [B], a FINISH_* code; 0 = running
    target_cache: PyTree
    drafter_state: PyTree
    stats: Stats | None
    logprobs: Logprobs | None

    @property
    def is_done(self) -> jax.Array:
        return self.finish != RUNNING

    @property
    def anchor(self) -> tuple[jax.Array, jax.Array]:
        """Token and position of each anchor, int32 [B] both."""
        position = self.lengths - 1
        token = jnp.take_along_axis(self.tokens, position[:, None], axis=1)[:, 0]
        return token, position


class RoundInfo(NamedTuple):
    """What one round did, as the golden traces record it."""

    draft: Draft
    confidence: jax.Array | None  # float32 [B, K], after the confidence temperatures
    verify_length: jax.Array  # int32 [B]
    num_accepted: jax.Array  # int32 [B]
    next_token: jax.Array  # int32 [B]
    num_committed: jax.Array  # int32 [B], tokens appended, after stops and limits
    commit_length: jax.Array  # int32 [B], the most drafts it could commit


class Generation(flax.struct.PyTreeNode):
    """The result of `speculative_generate` and `autoregressive_generate`."""

    tokens: (
        jax.Array
    )  # int32 [B, P + max_new_tokens]; past lengths[b] the input's padding
    lengths: jax.Array  # int32 [B], prompt included
    finish: jax.Array  # int32 [B], a FINISH_* code
    logprobs: Logprobs | None
    stats: Stats | None
    state: DecodeState | None = None


# Why a sequence ended; `FINISH_REASONS[code]` is its name.
RUNNING = 0
FINISH_STOP = 1  # a stop token was committed
FINISH_LENGTH = 2  # max_new_tokens, the row's limit or the target's last position
FINISH_NON_FINITE = 3  # the target's logits were NaN or infinite
FINISH_REASONS = ("running", "stop", "length", "non_finite")
