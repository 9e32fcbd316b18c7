"""A speculative round and its parts as steps of a loop, each with its least cost.

All steps share one state: a batch in the middle of decoding, whose context lies at
about `context` tokens all the time (it advances, and starts again). Nothing depends on
what the words are; random weights do as well as trained ones.

  round    everything: draft, verify, commit, observe
  plain    one token of plain decoding
  draft    the drafter's pass, base logits included
  markov   the K sequential draws
  target   the target's pass over K + 1 tokens, logits included
  verdict  sampling distributions, verification and commit
  observe  the drafter's context features of the fed tokens
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dspark_jax import sampling
from dspark_jax.config import Speculation
from dspark_jax.decoding import commit, prefill, round, verify
from dspark_jax.drafters import dspark
from dspark_jax.evaluation import round_costs
from dspark_jax.evaluation.device_loops import Step
from dspark_jax.evaluation.round_costs import Cost
from dspark_jax.sampling import Sampling
from dspark_jax.types import DecodeState, Draft, Drafter, PyTree, Row, Target

PARTS = ("round", "plain", "draft", "markov", "target", "verdict", "observe")
ROUND_PARTS = PARTS[2:]


@dataclasses.dataclass(frozen=True)
class Models:
    """What decodes; drafters of `dspark` only, whose parts are known."""

    target: Target
    target_params: PyTree
    drafter: Drafter
    drafter_params: dspark.DSparkParams


class Part(NamedTuple):
    """A step over the shared state, and what it must move at least."""

    step: Step
    inputs: PyTree
    cost: Cost


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


def make_state(key: jax.Array, models: Models, setting: Setting) -> DecodeState:
    """A batch in the middle of decoding; the context's keys and values are random."""
    batch, capacity = setting.batch, setting.context
    length = setting.options.draft_length or models.drafter.config.block_size
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
        filled.append(_normal(leaf_key, leaf.shape, leaf.dtype))
    cache, drafter_state = jax.tree.unflatten(tree, filled)
    vocab_size = models.target.config.vocab_size
    lengths = jnp.full((batch,), _first_length(setting, length), jnp.int32)
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


def make_parts(
    key: jax.Array, models: Models, setting: Setting, names: tuple[str, ...] = PARTS
) -> dict[str, Part]:
    """The steps called `names`; random inputs stand for what other parts make."""
    builder = _Builder(key, models, setting)
    parts: dict[str, Part] = {name: getattr(builder, name)() for name in names}
    if setting.attention is None:
        return parts
    return {
        name: part._replace(step=_attended(part.step, setting.attention))
        for name, part in parts.items()
    }


def _attended(step: Step, implementation: str) -> Step:
    """The step with another attention, over the same state."""

    def attended(state: DecodeState, inputs: PyTree) -> tuple[DecodeState, PyTree]:
        target = state.target_cache.implementation
        drafter = state.drafter_state.implementation
        changed = _with_attention(state, implementation, implementation)
        state, result = step(changed, inputs)
        return _with_attention(state, target, drafter), result

    return attended


def _with_attention(state: DecodeState, target: str, drafter: str) -> DecodeState:
    return state.replace(
        target_cache=state.target_cache.replace(implementation=target),
        drafter_state=state.drafter_state.replace(implementation=drafter),
    )


class _Builder:
    """Makes parts; a method a part."""

    def __init__(self, key: jax.Array, models: Models, setting: Setting):
        self._key, self._models, self._setting = key, models, setting
        self._config = models.drafter.config
        self._length = setting.options.draft_length or self._config.block_size
        self._settings = setting.sampling()
        self._stops = jnp.full((setting.batch, 1), -1, jnp.int32)
        params = models.drafter_params
        target_params = models.target_params
        self._head = params.head
        self._w2 = None if params.markov is None else params.markov.w2
        support = models.target.config.vocab_size
        if params.draft_vocabulary is not None:
            self._head = params.draft_vocabulary.head
            self._w2 = params.draft_vocabulary.w2
            support = len(params.draft_vocabulary.ids)
        elif self._head is None:
            head = target_params.head
            self._head = target_params.embed if head is None else head
        self._shape = round_costs.Shape(
            batch=setting.batch,
            context=setting.context,
            draft_length=self._length,
            support=support,
            candidates=setting.options.candidates,
        )

    def round(self) -> Part:
        models, setting = self._models, self._setting

        def step(state, inputs):
            target_params, drafter_params, stops, settings = inputs
            state, info = round.speculative_step(
                state,
                target=models.target,
                target_params=target_params,
                drafter=models.drafter,
                drafter_params=drafter_params,
                settings=settings,
                options=setting.options,
                stop_tokens=stops,
            )
            return self._wrapped(state), info.num_committed

        cost = Cost()
        for name in ROUND_PARTS:
            cost += self._cost(name)
        params = (models.target_params, models.drafter_params)
        return Part(step, (*params, self._stops, self._settings), cost)

    def plain(self) -> Part:
        models = self._models

        def step(state, inputs):
            target_params, stops, settings = inputs
            state = round.plain_step(
                state,
                target=models.target,
                target_params=target_params,
                settings=settings,
                stop_tokens=stops,
            )
            return self._wrapped(state), ()

        inputs = (models.target_params, self._stops, self._settings)
        return Part(step, inputs, self._cost("plain"))

    def draft(self) -> Part:
        models = self._models

        def step(state, inputs):
            target_params, drafter_params = inputs
            anchor, position = _anchor(state)
            hidden, base_logits, _, drafter_state = dspark.block_logits(
                self._config,
                models.target,
                drafter_params,
                target_params,
                state.drafter_state,
                anchor,
                position,
                self._length,
            )
            state = state.replace(drafter_state=drafter_state)
            return self._advanced(state), (hidden, base_logits)

        inputs = (models.target_params, models.drafter_params)
        return Part(step, inputs, self._cost("draft"))

    def markov(self) -> Part:
        models, shape = self._models, self._shape
        dtype = jnp.dtype(self._config.compute_dtype)
        hidden = _normal(
            self._key, (shape.batch, self._length, self._config.width), dtype
        )
        base_logits = _normal(
            self._key, (shape.batch, self._length, shape.support), jnp.float32
        )
        vocabulary = models.drafter_params.draft_vocabulary
        ids = None if vocabulary is None else vocabulary.ids

        def step(state, inputs):
            drafter_params, hidden, base_logits, settings = inputs
            lengths, hidden, base_logits = jax.lax.optimization_barrier(
                (state.lengths, hidden, base_logits)
            )
            state = state.replace(lengths=lengths)
            anchor, position = _anchor(state)
            sampler = sampling.make_draft_sampler(
                state.key,
                position,
                settings,
                draft_length=self._length,
                rule=self._setting.options.rule,
                candidates=shape.candidates,
            )
            draft = dspark.draw(
                self._config,
                drafter_params,
                sampler,
                anchor,
                hidden,
                base_logits,
                ids,
            )
            # What the round goes on to use: greedy verification reads tokens only.
            used: tuple[Any, ...] = (draft.tokens, draft.confidence_logits)
            if settings.temperature is not None:
                used = (*used, draft.probability, draft.logits, draft.row)
            return self._advanced(state), used

        inputs = (models.drafter_params, hidden, base_logits, self._settings)
        return Part(step, inputs, self._cost("markov"))

    def target(self) -> Part:
        models = self._models

        def step(state, target_params):
            fed, positions = self._window(state)
            hidden, taps, cache = models.target.forward(
                target_params,
                fed,
                positions,
                state.target_cache,
                tap_layers=self._config.tap_layers,
            )
            logits = models.target.unembed(target_params, hidden)
            state = self._advanced(state.replace(target_cache=cache))
            return state, (logits.astype(jnp.float32), taps)

        return Part(step, models.target_params, self._cost("target"))

    def verdict(self) -> Part:
        batch, length = self._shape.batch, self._length
        vocab_size = self._models.target.config.vocab_size
        logits = _normal(self._key, (batch, length + 1, vocab_size), jnp.float32)
        drafted = self._random_draft()

        def step(state, inputs):
            logits, draft, stops, settings = inputs
            lengths, logits, draft = jax.lax.optimization_barrier(
                (state.lengths, logits, draft)
            )
            state = state.replace(lengths=lengths)
            of_rows = jax.tree.map(lambda x: x[:, None], settings)
            rows = sampling.make_row(logits, of_rows)
            verdict = verify.verify(
                state.key,
                state.lengths - 1,
                draft,
                logits,
                rows,
                jnp.full((batch,), length, jnp.int32),
                settings,
                rule=self._setting.options.rule,
            )
            new_tokens = jnp.concatenate([draft.tokens, draft.tokens[:, -1:]], axis=1)
            offset = jnp.arange(length + 1, dtype=jnp.int32)[None]
            is_next = offset == verdict.num_accepted[:, None]
            new_tokens = jnp.where(is_next, verdict.next_token[:, None], new_tokens)
            state, count = commit.commit(
                state,
                new_tokens,
                verdict.num_accepted + 1,
                verdict.is_finite,
                stops,
                logits,
                rows,
                settings,
            )
            return self._wrapped(state), count

        inputs = (logits, drafted, self._stops, self._settings)
        return Part(step, inputs, self._cost("verdict"))

    def observe(self) -> Part:
        models = self._models
        size = len(self._config.tap_layers) * self._config.width
        dtype = jnp.dtype(models.target.config.compute_dtype)
        taps = _normal(self._key, (self._shape.batch, self._length + 1, size), dtype)

        def step(state, inputs):
            drafter_params, taps = inputs
            lengths, taps = jax.lax.optimization_barrier((state.lengths, taps))
            state = state.replace(lengths=lengths)
            fed, positions = self._window(state)
            drafter_state = models.drafter.observe(
                drafter_params, state.drafter_state, fed, positions, taps
            )
            return self._advanced(state.replace(drafter_state=drafter_state)), ()

        return Part(step, (models.drafter_params, taps), self._cost("observe"))

    def _cost(self, name: str) -> Cost:
        models, shape = self._models, self._shape
        target_config, width = models.target.config, self._length + 1
        params = models.drafter_params
        if name == "plain":
            cost = round_costs.of_target(target_config, models.target_params, shape, 1)
            return cost + round_costs.of_verdict(target_config, shape, 1)
        if name == "draft":
            return round_costs.of_draft(self._config, params, self._head, shape)
        if name == "markov":
            return round_costs.of_markov(params, shape, self._w2)
        if name == "target":
            return round_costs.of_target(
                target_config, models.target_params, shape, width
            )
        if name == "verdict":
            return round_costs.of_verdict(target_config, shape, width)
        return round_costs.of_observe(self._config, params, shape)

    def _random_draft(self) -> Draft:
        """What a sampled draft holds; greedy verification reads its tokens only."""
        batch, length, support = self._shape.batch, self._length, self._shape.support
        if self._shape.candidates is not None:
            support = self._shape.candidates
        tokens = jax.random.randint(
            self._key, (batch, length), 0, support, dtype=jnp.int32
        )
        zeros = jnp.zeros((batch, length), jnp.float32)
        logits = zeros[..., None]
        if self._settings.temperature is not None:
            logits = _normal(self._key, (batch, length, support), jnp.float32)
        ids = None
        if self._shape.candidates is not None:
            ids = jnp.broadcast_to(
                jnp.arange(support, dtype=jnp.int32), (batch, length, support)
            )
        elif self._models.drafter_params.draft_vocabulary is not None:
            ids = self._models.drafter_params.draft_vocabulary.ids
        row = Row(
            top=zeros,
            cut=jnp.full_like(zeros, -jnp.inf),
            log_normaliser=zeros + jnp.log(jnp.float32(support)),
            point=jnp.full_like(tokens, -1),
        )
        return Draft(
            tokens=tokens,
            probability=zeros + 1.0 / support,
            logits=logits,
            ids=ids,
            row=row,
            confidence_logits=None,
        )

    def _window(self, state: DecodeState) -> tuple[jax.Array, jax.Array]:
        """Tokens and positions of a full window [B, W]; the words are the buffer's."""
        offset = jnp.arange(self._length + 1, dtype=jnp.int32)[None]
        positions = state.lengths[:, None] - 1 + offset
        return jnp.take_along_axis(state.tokens, positions, axis=1), positions

    def _advanced(self, state: DecodeState) -> DecodeState:
        return self._wrapped(state.replace(lengths=state.lengths + 1))

    def _wrapped(self, state: DecodeState) -> DecodeState:
        """Back to the first length where another window would pass the capacity."""
        first = _first_length(self._setting, self._length)
        is_over = state.lengths > self._setting.context - self._length - 1
        return state.replace(lengths=jnp.where(is_over, first, state.lengths))


def _first_length(setting: Setting, draft_length: int) -> int:
    return setting.context - 3 * (draft_length + 1)


def _anchor(state: DecodeState) -> tuple[jax.Array, jax.Array]:
    position = state.lengths - 1
    anchor = jnp.take_along_axis(state.tokens, position[:, None], axis=1)[:, 0]
    return anchor, position


def _normal(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    make = jax.jit(jax.random.normal, static_argnames=("shape", "dtype"))
    return make(key, shape=shape, dtype=dtype)
