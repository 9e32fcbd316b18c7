"""Rounds of the real decoding loop, recorded one by one.

Everything that evaluation and calibration say about a drafter is computed from these
records: what a round was confident of, verified and accepted, and where. One compiled
program serves every batch, every temperature and every drafter of one structure; the
host looks at the results once a batch.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax import checks, types
from dspark_jax.config import Speculation
from dspark_jax.decoding import arguments, stepwise
from dspark_jax.evaluation.recording import PER_ROUND, Recording
from dspark_jax.sampling import Sampling
from dspark_jax.types import Drafter, PyTree, Target

WIDTH_MULTIPLE = 64  # prompts are padded to one width, a multiple of this


def record(
    target: Target,
    target_params: PyTree,
    drafter: Drafter,
    drafter_params: Sequence[PyTree],
    prompts: Sequence[Sequence[int]],
    keys: jax.Array,
    temperature: float = 1.0,
    rule: str = "token",
    draft_length: int | None = None,
    max_new_tokens: int = 128,
    batch: int = 16,
    *,
    stop_tokens: Any = None,
    candidates: int | None = None,
    confidence_threshold: float | None = None,
    confidence_temperatures: Any = None,
    max_verify_length: int | None = None,
    width: int | None = None,
    progress: Callable[[int, int], Any] | None = None,
) -> list[Recording]:
    """Decodes every prompt with every drafter and records the rounds.

    Args:
      drafter: static; its structure is that of all `drafter_params`.
      drafter_params: one or several; none of them compiles anew.
      prompts: token ids, each with at least one.
      keys: typed keys, one a prompt, or one key, which means `fold_in(key, prompt)`.
        They belong to the prompts: batch and order change no draw.
      temperature: 0 is greedy. All values above 0 share a program.
      rule, draft_length, candidates: see `Speculation`.
      max_new_tokens: of every prompt; shorter where a stop token ends it.
      batch: prompts that run together.
      stop_tokens: ids (n,); None takes the target's, () none.
      confidence_threshold, confidence_temperatures: see `speculative_generate`; None
        verifies full windows, which calibration and acceptance by position want.
      max_verify_length: a cap on every window; the drafter still drafts K slots.
      width: tokens that prompts are padded to; None takes what the longest needs. A
        fixed one lets several calls share a program.
      progress: called with (prompts done, prompts of all drafters).

    Returns:
      A Recording for each of `drafter_params`.

    Raises:
      ValueError, TypeError: as `speculative_generate`, and for no prompts.
    """
    if not prompts:
        raise ValueError("`prompts` must hold at least one prompt, got 0")
    checks.check_int("max_new_tokens", max_new_tokens, 2)
    checks.check_int("batch", batch, 1)
    if type(temperature) not in (int, float) or not 0 <= temperature < np.inf:
        raise ValueError(f"`temperature` must be a number >= 0, got {temperature!r}")
    longest = max(len(prompt) for prompt in prompts)
    if width is None:
        width = -(-longest // WIDTH_MULTIPLE) * WIDTH_MULTIPLE
    width = min(width, target.config.max_position)
    if longest > width:
        raise ValueError(f"`prompts` must have at most {width} tokens, got {longest}")
    options = Speculation(
        draft_length=draft_length,
        rule=rule,  # type: ignore[arg-type]
        candidates=candidates,
    )
    # Values are known here, not under the trace.
    length = arguments.check_models(target, drafter, options, is_speculative=True)
    arguments.make_threshold(confidence_threshold, drafter, batch)
    arguments.make_temperatures(confidence_temperatures, length)
    program = _Program(target, drafter, options, max_new_tokens)
    inputs = _Inputs(
        sampling=Sampling(
            temperature=None if temperature == 0 else _number(temperature)
        ),
        stop_tokens=_stop_tokens(stop_tokens, target),
        confidence_threshold=_number(confidence_threshold),
        confidence_temperatures=None
        if confidence_temperatures is None
        else np.asarray(confidence_temperatures, np.float32),
        max_verify_length=None
        if max_verify_length is None
        else jnp.full((batch,), max_verify_length, jnp.int32),
    )
    keys = checks.request_keys(keys, len(prompts))
    # A batch runs to its slowest row; alike lengths end alike most often.
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    found: list[list[_Log]] = [[] for _ in drafter_params]
    total = len(prompts) * len(drafter_params)
    done = 0
    for start in range(0, len(order), batch):
        chosen = order[start : start + batch]
        tokens, lengths, limits = _pad(prompts, chosen, batch, width, max_new_tokens)
        rows = np.resize(np.asarray(chosen), batch)
        for index, params in enumerate(drafter_params):
            log = jax.device_get(
                _run(
                    keys[rows],
                    tokens,
                    lengths,
                    limits,
                    target_params,
                    params,
                    inputs,
                    program=program,
                )
            )
            found[index].append(log)
            done += len(chosen)
            if progress is not None:
                progress(done, total)
    return [_collect(logs, order, batch, length) for logs in found]


class _Program(NamedTuple):
    """The static side of a program."""

    target: Target
    drafter: Drafter
    options: Speculation
    max_new_tokens: int


class _Inputs(NamedTuple):
    """The traced side that all batches share."""

    sampling: Sampling
    stop_tokens: np.ndarray  # int32 [m]
    confidence_threshold: np.ndarray | None  # float32 []
    confidence_temperatures: np.ndarray | None  # float32 [K]
    max_verify_length: jax.Array | None  # int32 [B]


class _Log(NamedTuple):
    """What one batch did; R rounds at most, those of the loop first."""

    is_counted: Any  # bool [R, B]
    position: Any  # int32 [R, B]
    num_drafted: Any  # int32 [R, B]
    verify_length: Any  # int32 [R, B]
    num_accepted: Any  # int32 [R, B]
    is_ended_by_stop: Any  # bool [R, B]
    confidence_logits: Any  # float32 [R, B, K] or None
    new_tokens: Any  # int32 [B, max_new_tokens]
    num_new: Any  # int32 [B]
    finish: Any  # int32 [B]


@functools.partial(jax.jit, static_argnames="program")
def _run(
    keys: jax.Array,
    tokens: jax.Array,
    lengths: jax.Array,
    limits: jax.Array,
    target_params: PyTree,
    drafter_params: PyTree,
    inputs: _Inputs,
    *,
    program: _Program,
) -> _Log:
    models: dict[str, Any] = {
        "target": program.target,
        "target_params": target_params,
        "drafter": program.drafter,
        "drafter_params": drafter_params,
        "options": program.options,
        "sampling": inputs.sampling,
        "stop_tokens": inputs.stop_tokens,
    }
    state = stepwise.prefill(
        keys,
        tokens,
        lengths,
        capacity=tokens.shape[1] + program.max_new_tokens,
        max_new_tokens=program.max_new_tokens,
        limits=limits,
        **models,
    )

    def one_round(state: types.DecodeState) -> tuple[types.DecodeState, dict[str, Any]]:
        before = state
        state, info = stepwise.speculative_round(
            state,
            confidence_threshold=inputs.confidence_threshold,
            confidence_temperatures=inputs.confidence_temperatures,
            max_verify_length=inputs.max_verify_length,
            **models,
        )
        is_stopped = state.finish == types.FINISH_STOP
        offered = info.draft.length
        if offered is None:
            offered = jnp.full_like(info.num_accepted, info.draft.tokens.shape[1])
        return state, {
            "is_counted": ~before.is_done & (state.finish != types.FINISH_NON_FINITE),
            "position": before.lengths - 1,
            "num_drafted": offered,
            "verify_length": info.verify_length,
            "num_accepted": info.num_accepted,
            # A stop token among the accepted drafts leaves no room for the next token.
            "is_ended_by_stop": is_stopped & (info.num_committed <= info.num_accepted),
            "confidence_logits": info.draft.confidence_logits,
        }

    # The first token comes from the prefill, and every round commits at least one.
    num_rounds = program.max_new_tokens - 1
    shapes = jax.eval_shape(one_round, state)[1]
    logs = jax.tree.map(lambda x: jnp.zeros((num_rounds, *x.shape), x.dtype), shapes)

    def body(carry: Any) -> Any:
        index, state, logs = carry
        state, log = one_round(state)
        logs = jax.tree.map(lambda all_, x: all_.at[index].set(x), logs, log)
        return index + 1, state, logs

    _, state, logs = jax.lax.while_loop(
        lambda carry: (carry[0] < num_rounds) & jnp.any(~carry[1].is_done),
        body,
        (jnp.int32(0), state, logs),
    )
    columns = jnp.arange(program.max_new_tokens, dtype=jnp.int32)[None]
    new = jnp.take_along_axis(state.tokens, lengths[:, None] + columns, axis=1)
    return _Log(
        new_tokens=new, num_new=state.lengths - lengths, finish=state.finish, **logs
    )


def _pad(
    prompts: Sequence[Sequence[int]],
    chosen: Sequence[int],
    batch: int,
    width: int,
    max_new_tokens: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens [B, P], lengths [B] and limits [B]; rows beyond `chosen` end at once."""
    tokens = np.zeros((batch, width), np.int32)
    lengths = np.ones((batch,), np.int32)
    limits = np.zeros((batch,), np.int32)
    for row, index in enumerate(chosen):
        prompt = prompts[index]
        if not len(prompt):
            raise ValueError(f"`prompts[{index}]` must hold at least one token, got 0")
        tokens[row, : len(prompt)] = prompt
        lengths[row] = len(prompt)
        limits[row] = max_new_tokens
    return tokens, lengths, limits


def _collect(
    logs: list[_Log], order: Sequence[int], batch: int, draft_length: int
) -> Recording:
    """One Recording; prompt `order[i]` was row i % batch of batch i // batch."""
    places = {index: divmod(place, batch) for place, index in enumerate(order)}
    rounds: dict[str, list[np.ndarray]] = {name: [] for name in PER_ROUND}
    request, confidences, texts, finish = [], [], [], []
    has_confidence = logs[0].confidence_logits is not None
    for index in range(len(order)):
        number, row = places[index]
        log = logs[number]
        counted = log.is_counted[:, row]
        for name, parts in rounds.items():
            parts.append(getattr(log, name)[counted, row])
        request.append(np.full(int(counted.sum()), index, np.int32))
        if has_confidence:
            confidences.append(log.confidence_logits[counted, row])
        texts.append(log.new_tokens[row, : log.num_new[row]])
        finish.append(log.finish[row])
    return Recording(
        **{name: np.concatenate(parts) for name, parts in rounds.items()},
        request=np.concatenate(request),
        confidence_logits=np.concatenate(confidences) if has_confidence else None,
        new_tokens=tuple(texts),
        finish=np.asarray(finish),
        draft_length=draft_length,
    )


def _stop_tokens(stop_tokens: Any, target: Target) -> np.ndarray:
    ids = target.config.stop_tokens if stop_tokens is None else stop_tokens
    return np.asarray(list(ids) or [-1], np.int32)


def _number(value: float | None) -> np.ndarray | None:
    """Without a weak type, so that the same program serves every value."""
    return None if value is None else np.asarray(value, np.float32)
