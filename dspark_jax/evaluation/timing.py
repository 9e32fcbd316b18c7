"""Wall clock of decoding loops that take turns: plain, and one a drafter.

Every loop decodes the same groups of prompts, as many tokens each, and no stop token
ends one early. All loops run once on a group before any runs again, so that a slow
minute of the machine hits all of them; ratios are taken group by group. Decoding is
timed without the prefill, and whole calls beside it.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from dspark_jax.config import Speculation
from dspark_jax.decoding import stepwise
from dspark_jax.sampling import Sampling
from dspark_jax.types import DecodeState, Drafter, PyTree, Target

PLAIN = "plain"


class Loop(NamedTuple):
    """What decodes: `drafter` None is plain decoding."""

    drafter: Drafter | None
    drafter_params: PyTree
    options: Speculation


class Timing(NamedTuple):
    """One loop over all groups; medians over groups unless a name says otherwise."""

    tokens_per_second: float  # of decoding, all rows of a batch together
    ms_per_token: float  # of one row
    seconds: list[float]  # of decoding, a group each
    speedup_over_plain_median: float
    speedup_over_plain_total: float  # sum of seconds over sum of seconds
    whole_call_speedup_median: float | None  # the prefill included
    whole_seconds: list[float] | None
    num_equal: int | None  # texts equal to plain decoding's
    ms_per_round: float | None
    accepted_length: float | None  # τ


def compare(
    loops: Mapping[str, Loop],
    groups: Sequence[Sequence[Sequence[int]]],
    *,
    target: Target,
    target_params: PyTree,
    key: jax.Array,
    temperature: float = 0.0,
    max_new_tokens: int = 64,
    repeats: int = 3,
    others: Mapping[str, Callable[[Sequence[Sequence[int]]], float]] | None = None,
    log: Callable[[str], Any] | None = None,
) -> dict[str, Timing]:
    """Times plain decoding and `loops`, interleaved, on every group of prompts.

    Args:
      loops: by name; "plain" is added first and its speed is the yardstick.
      groups: batches of prompts (token ids), all of one size.
      key: one typed key; prompt p of group g draws with a key of its own.
      repeats: runs a group; medians count. One more, of the first group, compiles.
      others: programs outside this process, by name: prompts -> seconds of decoding.

    Returns:
      Timings in the order plain, loops, others.
    """
    if PLAIN in loops:
        raise ValueError(f"`loops` must not name {PLAIN!r}: it is added")
    size = len(groups[0]) if groups else 0
    if size == 0 or any(len(group) != size for group in groups):
        raise ValueError(
            "`groups` must hold batches of one size, at least 1, got sizes "
            f"{[len(group) for group in groups]}"
        )
    longest = max(len(prompt) for group in groups for prompt in group)
    width = min(-(-longest // 64) * 64, target.config.max_position)
    others = others or {}
    programs = {
        name: _Program(loop, target, target_params, temperature, width, max_new_tokens)
        for name, loop in {PLAIN: Loop(None, None, Speculation()), **loops}.items()
    }
    totals = {name: _Totals() for name in (*programs, *others)}
    for number, group in enumerate(groups):
        inputs = _inputs(key, number, group, width)
        seconds: dict[str, list[float]] = {name: [] for name in totals}
        whole: dict[str, list[float]] = {name: [] for name in programs}
        states: dict[str, DecodeState] = {}
        for repeat in range(repeats + (number == 0)):
            is_warm = number > 0 or repeat > 0
            for name, program in programs.items():
                states[name], decoding, all_of_it = program.run(*inputs)
                if is_warm:
                    seconds[name].append(decoding)
                    whole[name].append(all_of_it)
            for name, other in others.items():
                spent = other(group)
                if is_warm:
                    seconds[name].append(spent)
        words = np.asarray(states[PLAIN].tokens)
        for name, total in totals.items():
            total.seconds.append(float(np.median(seconds[name])))
            if name in programs:
                total.add(states[name], float(np.median(whole[name])), words)
        if log is not None:
            line = {n: round(1e3 * total.seconds[-1]) for n, total in totals.items()}
            log(f"group {number + 1}/{len(groups)}, ms: {line}")
    plain = totals[PLAIN]
    # The prefill draws the first token: decoding makes the others.
    new = (max_new_tokens - 1) * size
    return {name: total.timing(plain, new, size) for name, total in totals.items()}


class _Program:
    """The jitted prefill and decoding of one loop."""

    def __init__(
        self,
        loop: Loop,
        target: Target,
        target_params: PyTree,
        temperature: float,
        width: int,
        max_new_tokens: int,
    ):
        shared: dict[str, Any] = {
            "target": target,
            "sampling": Sampling(temperature=temperature or None),
            "stop_tokens": (),
        }
        drafter, options = loop.drafter, loop.options

        def prefill(keys, tokens, lengths, target_params, drafter_params):
            return stepwise.prefill(
                keys,
                tokens,
                lengths,
                target_params=target_params,
                drafter=drafter,
                drafter_params=drafter_params,
                capacity=width + max_new_tokens,
                max_new_tokens=max_new_tokens,
                options=options,
                **shared,
            )

        def decode(state, target_params, drafter_params):
            if drafter is None:
                return stepwise.autoregressive_steps(
                    state, None, target_params=target_params, **shared
                )
            return stepwise.speculative_rounds(
                state,
                None,
                target_params=target_params,
                drafter=drafter,
                drafter_params=drafter_params,
                options=options,
                **shared,
            )

        self._prefill, self._decode = jax.jit(prefill), jax.jit(decode)
        self._params = (target_params, loop.drafter_params)

    def run(
        self, keys: jax.Array, tokens: np.ndarray, lengths: np.ndarray
    ) -> tuple[DecodeState, float, float]:
        """The final state, seconds of decoding and seconds of everything."""
        begin = time.perf_counter()
        state = jax.block_until_ready(
            self._prefill(keys, tokens, lengths, *self._params)
        )
        middle = time.perf_counter()
        state = jax.block_until_ready(self._decode(state, *self._params))
        end = time.perf_counter()
        return state, end - middle, end - begin


class _Totals:
    """Sums of one loop over the groups."""

    def __init__(self):
        self.seconds: list[float] = []
        self.whole: list[float] = []
        self.num_equal = 0
        self.rounds = 0  # of the slowest row of each group
        self.num_rounds = 0
        self.accepted_sum = 0

    def add(self, state: DecodeState, whole: float, words: np.ndarray) -> None:
        self.whole.append(whole)
        self.num_equal += int(np.all(np.asarray(state.tokens) == words, axis=1).sum())
        if state.stats is not None:
            stats = jax.device_get(state.stats)
            self.rounds += int(stats.num_rounds.max())
            self.num_rounds += int(stats.num_rounds.sum())
            self.accepted_sum += int(stats.accepted_sum.sum())

    def timing(self, plain: "_Totals", new: int, size: int) -> Timing:
        median = float(np.median(self.seconds))
        ratios = np.array(plain.seconds) / np.array(self.seconds)
        has_rounds = self.num_rounds > 0
        return Timing(
            tokens_per_second=new / median,
            ms_per_token=1e3 * median * size / new,
            seconds=self.seconds,
            speedup_over_plain_median=float(np.median(ratios)),
            speedup_over_plain_total=sum(plain.seconds) / sum(self.seconds),
            whole_call_speedup_median=float(
                np.median(np.array(plain.whole) / np.array(self.whole))
            )
            if self.whole
            else None,
            whole_seconds=self.whole or None,
            num_equal=self.num_equal if self.whole else None,
            ms_per_round=1e3 * sum(self.seconds) / self.rounds if has_rounds else None,
            accepted_length=self.accepted_sum / self.num_rounds if has_rounds else None,
        )


def _inputs(
    key: jax.Array, number: int, group: Sequence[Sequence[int]], width: int
) -> tuple[jax.Array, np.ndarray, np.ndarray]:
    """Keys [B], tokens [B, P] and lengths [B] of a group."""
    tokens = np.zeros((len(group), width), np.int32)
    for row, prompt in enumerate(group):
        tokens[row, : len(prompt)] = prompt
    lengths = np.array([len(prompt) for prompt in group], np.int32)
    keys = jax.random.split(jax.random.fold_in(key, number), len(group))
    return keys, tokens, lengths
