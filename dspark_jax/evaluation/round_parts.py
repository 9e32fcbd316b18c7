"""A speculative round and its parts as steps of a loop, each with its least cost.

All steps share one state (`round_state`), and take what other parts would make as
random inputs. `part_names` says what the parts are.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dspark_jax import draft_sampler, sampling
from dspark_jax.decoding import commit, round, verify
from dspark_jax.drafters import dspark
from dspark_jax.evaluation import round_costs, round_state
from dspark_jax.evaluation.device_loops import Step
from dspark_jax.evaluation.part_names import ROUND_PARTS
from dspark_jax.evaluation.round_costs import Cost
from dspark_jax.evaluation.round_state import Models, Setting
from dspark_jax.types import DecodeState, Draft, PyTree, Row


class Part(NamedTuple):
    """A step over the shared state, and what it must move at least."""

    step: Step
    inputs: PyTree
    cost: Cost


def make_parts(
    key: jax.Array, models: Models, setting: Setting, names: tuple[str, ...]
) -> dict[str, Part]:
    """The steps called `names`, some of `part_names.PARTS`."""
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
        self._length = setting.length(models)
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
            anchor, position = state.anchor
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
        hidden = round_state.normal(
            self._key, (shape.batch, self._length, self._config.width), dtype
        )
        base_logits = round_state.normal(
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
            anchor, position = state.anchor
            sampler = draft_sampler.make_draft_sampler(
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
            fed, positions = round_state.window(state, self._length)
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
        logits = round_state.normal(
            self._key, (batch, length + 1, vocab_size), jnp.float32
        )
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
        taps = round_state.normal(
            self._key, (self._shape.batch, self._length + 1, size), dtype
        )

        def step(state, inputs):
            drafter_params, taps = inputs
            lengths, taps = jax.lax.optimization_barrier((state.lengths, taps))
            state = state.replace(lengths=lengths)
            fed, positions = round_state.window(state, self._length)
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
            logits = round_state.normal(
                self._key, (batch, length, support), jnp.float32
            )
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

    def _advanced(self, state: DecodeState) -> DecodeState:
        return self._wrapped(state.replace(lengths=state.lengths + 1))

    def _wrapped(self, state: DecodeState) -> DecodeState:
        return round_state.wrap(state, self._setting.context, self._length)
