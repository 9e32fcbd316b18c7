"""A batch in the middle of decoding that stays there: the state of a benchmark's loops.

Its context lies at about `context` tokens all the time: it advances, and starts again.
Nothing depends on what the words are; random weights do as well as trained ones.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from dspark_jax import sampling
from dspark_jax.config import Speculation
from dspark_jax.decoding import prefill
from dspark_jax.drafters import dspark
from dspark_jax.sampling import Sampling
from dspark_jax.types import DecodeState, Drafter, PyTree, Target


@dataclasses.dataclass(frozen=True)
class Models:
    """What decodes; drafters of `dspark` only, whose parts are known."""

    target: Target
    target_params: PyTree
    drafter: Drafter
    drafter_params: dspark.DSparkParams


@dataclasses.dataclass(frozen=True)
class Setting:
    """The shape of the batch and how it decodes."""

    batch: int
    context: int
    options: Speculation
    temperature: float = 0.0
    attention: str | None = None  # None: as the models say

    def sampling(self) -> Sampling:
        return sampling.check_sampling(
            Sampling(temperature=self.temperature) if self.temperature else Sampling(),
            self.batch,
        )

    def length(self, models: Models) -> int:
        """Drafts of a round: as the options say, or the drafter's block size."""
        return self.options.draft_length or models.drafter.config.block_size


def make_state(key: jax.Array, models: Models, setting: Setting) -> DecodeState:
    """A batch in the middle of decoding; the context's keys and values are random."""
    batch, capacity = setting.batch, setting.context
    length = setting.length(models)
    cache_key, token_key, state_key = jax.random.split(key, 3)
    caches = jax.eval_shape(
        lambda: (
            models.target.init_cache(batch, capacity),
            models.drafter.init_state(batch, capacity),
        )
    )
    leaves, tree = jax.tree.flatten(caches)
    filled = []
    for index, leaf in enumerate(leaves):
        leaf_key = jax.random.fold_in(cache_key, index)
        filled.append(normal(leaf_key, leaf.shape, leaf.dtype))
    cache, drafter_state = jax.tree.unflatten(tree, filled)
    vocab_size = models.target.config.vocab_size
    lengths = jnp.full((batch,), _first_length(capacity, length), jnp.int32)
    return DecodeState(
        key=jax.random.split(state_key, batch),
        tokens=jax.random.randint(
            token_key, (batch, capacity), 0, vocab_size, jnp.int32
        ),
        lengths=lengths,
        limits=jnp.full((batch,), 2**30, jnp.int32),
        finish=jnp.zeros((batch,), jnp.int32),
        target_cache=cache,
        drafter_state=drafter_state,
        stats=prefill.empty_stats(lengths, length),
        logprobs=None,
    )


def window(state: DecodeState, draft_length: int) -> tuple[jax.Array, jax.Array]:
    """Tokens and positions of a full window [B, W]; the words are the buffer's."""
    offset = jnp.arange(draft_length + 1, dtype=jnp.int32)[None]
    positions = state.lengths[:, None] - 1 + offset
    return jnp.take_along_axis(state.tokens, positions, axis=1), positions


def wrap(state: DecodeState, context: int, draft_length: int) -> DecodeState:
    """Back to the first length where another window would pass the capacity."""
    is_over = state.lengths > context - draft_length - 1
    first = _first_length(context, draft_length)
    return state.replace(lengths=jnp.where(is_over, first, state.lengths))


def normal(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Random numbers, made by a program of their own."""
    make = jax.jit(jax.random.normal, static_argnames=("shape", "dtype"))
    return make(key, shape=shape, dtype=dtype)


def _first_length(context: int, draft_length: int) -> int:
    return context - 3 * (draft_length + 1)
