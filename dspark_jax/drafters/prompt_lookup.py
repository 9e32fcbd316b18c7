"""Prompt lookup: drafts by copying what followed the last n-gram earlier in the text.

The drafter-free baseline behind the same contract: no parameters, no taps. A proposal
is a point mass on the copied token, so every rule verifies it exactly. It offers fewer
than K slots where the earlier text ends, and none where nothing matches.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from dspark_jax import config as config_lib
from dspark_jax.draft_sampler import DraftSampler
from dspark_jax.types import Bound, Draft, Drafter, PyTree, Row


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptLookupConfig:
    """Longest and shortest n-gram to match, and the largest draft length."""

    block_size: int = 7
    max_ngram: int = 3
    min_ngram: int = 1
    tap_layers: tuple[int, ...] = ()
    confidence_kind: str = "none"
    target_fingerprint: str = ""

    def __post_init__(self):
        config_lib.check_types(self)
        if not 1 <= self.min_ngram <= self.max_ngram:
            raise ValueError(
                "min_ngram must lie in 1..max_ngram, got "
                f"{self.min_ngram} and max_ngram {self.max_ngram}"
            )
        if self.block_size < 1:
            raise ValueError(f"block_size must be positive, got {self.block_size}")
        if self.tap_layers or self.confidence_kind != "none":
            raise ValueError(
                "prompt lookup has no taps and no confidence head, got tap_layers "
                f"{self.tap_layers} and confidence_kind {self.confidence_kind!r}"
            )


def make_prompt_lookup(
    block_size: int = 7, *, max_ngram: int = 3, min_ngram: int = 1
) -> tuple[Drafter, tuple[()]]:
    """The prompt-lookup Drafter and its (empty) parameters.

    >>> drafter, drafter_params = make_prompt_lookup(block_size=4)
    >>> drafter.config.block_size
    4
    """
    config = PromptLookupConfig(
        block_size=block_size, max_ngram=max_ngram, min_ngram=min_ngram
    )
    drafter = Drafter(
        config=config,
        init_state=_init_state,
        observe=_observe,
        propose=Bound(_propose, (config,)),
    )
    return drafter, ()


def _init_state(batch: int, capacity: int) -> jax.Array:
    return jnp.full((batch, capacity), -1, jnp.int32)


def _observe(
    params: PyTree,
    state: Int[Array, "B C"],
    tokens: Int[Array, "B W"],
    positions: Int[Array, "B W"],
    taps: None,
) -> Int[Array, "B C"]:
    del params, taps
    index = jnp.where(positions < 0, state.shape[1], positions)
    request = jnp.arange(state.shape[0], dtype=jnp.int32)[:, None]
    return state.at[request, index].set(tokens.astype(jnp.int32), mode="drop")


def _propose(
    config: PromptLookupConfig,
    params: PyTree,
    target_params: PyTree,
    state: Int[Array, "B C"],
    anchor: Int[Array, "B"],
    position: Int[Array, "B"],
    sampler: DraftSampler,
) -> tuple[Draft, Int[Array, "B C"]]:
    del params, target_params
    length = sampler.draft_length
    tokens, offered = jax.vmap(
        lambda history, token, at: _look_up(config, history, token, at, length)
    )(state, anchor, position)
    shape = tokens.shape
    draft = Draft(
        tokens=tokens,
        probability=jnp.ones(shape, jnp.float32),
        logits=jnp.zeros((*shape, 1), jnp.float32),
        ids=tokens[..., None],
        row=Row(
            top=jnp.zeros(shape, jnp.float32),
            cut=jnp.full(shape, -jnp.inf, jnp.float32),
            log_normaliser=jnp.zeros(shape, jnp.float32),
            point=tokens,
        ),
        confidence_logits=None,
        length=offered,
    )
    return draft, state


def _look_up(
    config: PromptLookupConfig,
    history: Int[Array, "C"],
    anchor: Int[Array, ""],
    position: Int[Array, ""],
    length: int,
) -> tuple[Int[Array, "K"], Int[Array, ""]]:
    """The longest, then latest, earlier match of the text that ends in the anchor."""
    index = jnp.arange(history.shape[0], dtype=jnp.int32)
    # Stale tokens at or beyond the anchor must not be copied.
    text = jnp.where(index < position, history, -1)
    text = jnp.where(index == position, anchor, text)
    matched = jnp.ones(history.shape, bool)
    best = jnp.zeros(history.shape, jnp.int32)  # n-gram length that ends at each index
    for back in range(config.max_ngram):
        earlier = jnp.roll(text, back)
        same = earlier == text[jnp.maximum(position - back, 0)]
        matched = matched & same & (index >= back) & (position >= back)
        best = best + matched.astype(jnp.int32)
    best = jnp.where((index < position) & (best >= config.min_ngram), best, 0)
    score = best * history.shape[0] + index
    end = jnp.argmax(jnp.where(best > 0, score, -1)).astype(jnp.int32)
    is_found = best[end] > 0
    source = end + 1 + jnp.arange(length, dtype=jnp.int32)
    tokens = jnp.take(text, source, mode="clip")
    offered = jnp.where(is_found, jnp.minimum(length, position - end), 0)
    # Positions that were never observed hold -1, which is no token to offer.
    is_known = jnp.cumprod((tokens >= 0).astype(jnp.int32), dtype=jnp.int32)
    offered = jnp.minimum(offered, jnp.sum(is_known, dtype=jnp.int32))
    # Slots that are not offered still hold a valid id.
    is_offered = jnp.arange(length, dtype=jnp.int32) < offered
    return jnp.where(is_offered, tokens, anchor), offered.astype(jnp.int32)
