"""What a step costs: seconds over requests, packed tokens and context tokens.

Three kinds of measurement, one question. `TokenCurve` knows the packed tokens only (the
paper's SPS table); `Additive` is t0 + alpha(requests) + theta(packed tokens), plus a
term for the context that every decode step reads once; `Grid` interpolates measured
steps. Between probes seconds, not steps per second, are interpolated linearly (a
table read as a staircase makes tokens look free just before a rise); beyond the last
probe the last slope goes on; below the first its value holds. Noisy probes are made
monotone first.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from dspark_jax.scheduling import probes


class Surface(Protocol):
    """Seconds of one kind of step."""

    def seconds(
        self, requests: int, packed_tokens: Any, context_tokens: float = 0
    ) -> np.ndarray:
        """Seconds, float64 of the shape of `packed_tokens`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
    """The costs of an engine's steps on one device.

    Attributes:
      drafting: of a speculative step, its draft included.
      plain: of a step without a draft, whose packed tokens are its requests; None: it
        costs what a speculative step of as many tokens costs.
      info: what was measured, where and when (device, date, models): strings, numbers.
    """

    drafting: Surface
    plain: Surface | None = None
    info: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def seconds(
        self, requests: int, packed_tokens: Any, context_tokens: float = 0
    ) -> np.ndarray:
        """Seconds of speculative steps: float64, the shape of `packed_tokens`.

        Ask at the sizes that run: those of the compiled programs, padding included.

        Args:
          requests: B, at least 1.
          packed_tokens: ints [n] or [], T = sum of the verify windows.
          context_tokens: tokens in the caches of all requests together.
        """
        return self.drafting.seconds(requests, packed_tokens, context_tokens)

    def plain_seconds(self, requests: int, context_tokens: float = 0) -> float:
        """Seconds of a step that drafts nothing and draws a token for each request."""
        surface = self.drafting if self.plain is None else self.plain
        return float(surface.seconds(requests, requests, context_tokens))


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenCurve:
    """Seconds at numbers of packed tokens, whatever the requests (SGLang's form A).

    Attributes:
      packed_tokens: strictly increasing probes, at least 1.
      step_seconds: at each probe; made monotone when the curve is made.
      max_tokens: largest number of tokens that the curve is meant for.
      repair: largest relative change that made it monotone.
    """

    packed_tokens: tuple[int, ...]
    step_seconds: tuple[float, ...]
    max_tokens: int
    repair: float = dataclasses.field(init=False)

    def __post_init__(self):
        probes.check_probes("packed_tokens", self.packed_tokens)
        probes.check_seconds(
            "step_seconds", self.step_seconds, (len(self.packed_tokens),)
        )
        if type(self.max_tokens) is not int or self.max_tokens > probes.MAX_SIZE:
            raise ValueError(
                "`max_tokens` must be an integer of at most 2**40, got "
                f"{probes.shortened(self.max_tokens)}"
            )
        if self.max_tokens < self.packed_tokens[-1]:
            raise ValueError(
                "`max_tokens` must be at least the last probe, "
                f"{self.packed_tokens[-1]}, got {self.max_tokens}"
            )
        values = np.asarray(self.step_seconds, np.float64)
        smooth = probes.isotonic(values)
        object.__setattr__(self, "step_seconds", tuple(smooth.tolist()))
        object.__setattr__(self, "repair", probes.change(values, smooth))

    def seconds(
        self, requests: int, packed_tokens: Any, context_tokens: float = 0
    ) -> np.ndarray:
        """Seconds, float64 of the shape of `packed_tokens`."""
        return probes.interpolate(packed_tokens, self.packed_tokens, self.step_seconds)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Additive:
    """t0 + alpha(requests) + theta(packed tokens) + beta * context (SGLang's form B).

    Attributes:
      bias_seconds: t0, positive.
      requests, alpha_seconds: strictly increasing probes, and alpha at each.
      packed_tokens, theta_seconds: the same of theta.
      context_seconds: beta, per token in the caches; SGLang's files have none.
      repair: largest change that made alpha and theta monotone, relative to t0.
    """

    bias_seconds: float
    requests: tuple[int, ...]
    alpha_seconds: tuple[float, ...]
    packed_tokens: tuple[int, ...]
    theta_seconds: tuple[float, ...]
    context_seconds: float = 0.0
    repair: float = dataclasses.field(init=False)

    def __post_init__(self):
        if not probes.is_finite(self.bias_seconds) or self.bias_seconds <= 0:
            raise ValueError(
                "`bias_seconds` must be positive and finite, got "
                f"{probes.shortened(self.bias_seconds)}"
            )
        if not probes.is_finite(self.context_seconds) or self.context_seconds < 0:
            raise ValueError(
                "`context_seconds` must be finite and at least 0, got "
                f"{probes.shortened(self.context_seconds)}"
            )
        repair = 0.0
        for axis, name in (
            ("requests", "alpha_seconds"),
            ("packed_tokens", "theta_seconds"),
        ):
            probes.check_probes(axis, getattr(self, axis))
            shape = (len(getattr(self, axis)),)
            probes.check_seconds(name, getattr(self, name), shape, may_be_zero=True)
            values = np.asarray(getattr(self, name), np.float64)
            smooth = probes.isotonic(values)
            object.__setattr__(self, name, tuple(smooth.tolist()))
            largest = float(np.abs(values - smooth).max())
            repair = max(repair, largest / self.bias_seconds)
        object.__setattr__(self, "repair", repair)

    def seconds(
        self, requests: int, packed_tokens: Any, context_tokens: float = 0
    ) -> np.ndarray:
        """Seconds, float64 of the shape of `packed_tokens`."""
        fixed = self.bias_seconds + self.context_seconds * context_tokens
        alpha = probes.interpolate(requests, self.requests, self.alpha_seconds)
        theta = probes.interpolate(
            packed_tokens, self.packed_tokens, self.theta_seconds
        )
        return np.asarray(fixed + alpha + theta)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plane:
    """Measured seconds of steps of so many requests.

    Attributes:
      requests: B.
      packed_tokens: [n], context_tokens: [m], strictly increasing probes.
      step_seconds: n rows of m values; made monotone along both when it is made.
      repair: largest relative change that made it monotone.
    """

    requests: int
    packed_tokens: tuple[int, ...]
    context_tokens: tuple[int, ...]
    step_seconds: tuple[tuple[float, ...], ...]
    repair: float = dataclasses.field(init=False)

    def __post_init__(self):
        if type(self.requests) is not int or self.requests < 1:
            raise ValueError(
                "`requests` must be an integer of at least 1, got "
                f"{probes.shortened(self.requests)}"
            )
        probes.check_probes("packed_tokens", self.packed_tokens)
        probes.check_probes("context_tokens", self.context_tokens, low=0)
        shape = (len(self.packed_tokens), len(self.context_tokens))
        probes.check_seconds("step_seconds", self.step_seconds, shape)
        values = np.asarray(self.step_seconds, np.float64)
        # The second pass keeps what the first made: equal rows stay ordered.
        smooth = probes.isotonic(probes.isotonic(values, axis=0), axis=1)
        rows = tuple(tuple(row) for row in smooth.tolist())
        object.__setattr__(self, "step_seconds", rows)
        object.__setattr__(self, "repair", probes.change(values, smooth))

    def seconds(self, packed_tokens: Any, context_tokens: float) -> np.ndarray:
        """Seconds, float64 of the shape of `packed_tokens`."""
        at, share = probes.bracket(float(context_tokens), self.context_tokens)
        after = min(at + 1, len(self.context_tokens) - 1)
        column, most = [], 0.0
        for row in self.step_seconds:  # a few: numbers are faster than arrays
            # Slopes of rows may cross beyond the last probe: keep their order.
            most = max(row[at] + share * (row[after] - row[at]), most)  # NaN stays
            column.append(most)
        return probes.interpolate(packed_tokens, self.packed_tokens, column)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grid:
    """Measured steps, interpolated along context, packed tokens and requests.

    Attributes:
      planes: one for each number of requests, strictly increasing.
    """

    planes: tuple[Plane, ...]

    def __post_init__(self):
        probes.check_probes("requests", tuple(plane.requests for plane in self.planes))

    @functools.cached_property
    def _requests(self) -> tuple[int, ...]:
        return tuple(plane.requests for plane in self.planes)

    @property
    def repair(self) -> float:
        """Largest relative change that made the planes monotone."""
        return max(plane.repair for plane in self.planes)

    def seconds(
        self, requests: int, packed_tokens: Any, context_tokens: float = 0
    ) -> np.ndarray:
        """Seconds, float64 of the shape of `packed_tokens`."""
        at, share = probes.bracket(requests, self._requests)
        low = self.planes[at].seconds(packed_tokens, context_tokens)
        if share == 0:
            return low
        high = self.planes[at + 1].seconds(packed_tokens, context_tokens)
        # Planes are not made monotone against each other: beyond the last one a falling
        # pair must not lead to steps that cost nothing.
        mixed = low + share * (high - low)
        return np.asarray(np.maximum(mixed, high) if share > 1 else mixed)


def curve(
    costs: Costs,
    requests: int,
    draft_length: int,
    context_tokens: float = 0,
    *,
    buckets: Sequence[int] | None = None,
) -> np.ndarray:
    """Steps per second at every number of packed tokens 0..B(K+1), for `planner.plan`.

    Entries 0..B-1 are 1; `plan` does not read them.

    Args:
      buckets: sizes of the compiled programs: each number costs what the next larger
        size costs (beyond the largest: its own).
    """
    tokens = np.arange(requests, requests * (draft_length + 1) + 1)
    if buckets is not None:
        sizes = np.asarray(buckets)
        place = np.searchsorted(sizes, tokens)
        padded = sizes[np.minimum(place, len(sizes) - 1)]
        tokens = np.where(place < len(sizes), padded, tokens)
    seconds = costs.seconds(requests, tokens, context_tokens)
    return np.concatenate([np.ones(requests), 1 / seconds])
