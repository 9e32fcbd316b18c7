"""Loads to measure an engine under: a closed loop, and Poisson arrivals.

A closed loop keeps a number of requests running; an open one lets them come when they
come, whether or not the engine keeps up.
"""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from dspark_jax.sampling import Sampling
from dspark_jax.serving.engine import Engine
from dspark_jax.serving.requests import RequestHandle


@dataclasses.dataclass(frozen=True)
class Job:
    """A request of a load."""

    domain: str
    tokens: Sequence[int]
    max_new_tokens: int
    seed: int
    stop_tokens: tuple[int, ...] = ()
    sampling: Sampling = dataclasses.field(default_factory=Sampling)

    def submit(self, engine: Engine) -> RequestHandle:
        return engine.submit(
            self.tokens,
            max_new_tokens=self.max_new_tokens,
            sampling=self.sampling,
            seed=self.seed,
            stop_tokens=self.stop_tokens,
        )


@dataclasses.dataclass(frozen=True)
class Trial:
    """What a load brought.

    Attributes:
      handles: of the jobs, in their order.
      seconds: from the first submission to the last token.
      metrics: the engine's, of this load alone.
    """

    handles: list[RequestHandle]
    seconds: float
    metrics: dict[str, Any]

    @property
    def num_tokens(self) -> int:
        return sum(len(handle.tokens) for handle in self.handles)

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def user_tokens_per_second(self) -> float:
        """Median over requests of tokens a second after the first one."""
        rates = [
            (len(handle.tokens) - 1) / (handle.finished_at - handle.first_token_at)
            for handle in self.handles
            if handle.finished_at is not None
            and handle.first_token_at is not None
            and handle.finished_at > handle.first_token_at
        ]
        return float(np.median(rates)) if rates else 0.0


def run_closed(
    engine: Engine, jobs: Sequence[Job], concurrency: int | None = None
) -> Trial:
    """All jobs, `concurrency` at once (None: as many as there are slots).

    Each that ends is followed by the next.
    """
    most = engine.config.num_slots if concurrency is None else concurrency
    if not 1 <= most <= engine.config.num_slots:
        raise ValueError(
            f"`concurrency` must lie in 1..{engine.config.num_slots}, the engine's "
            f"slots, got {most}"
        )
    engine.metrics(reset=True)
    started_at = time.perf_counter()
    handles: list[RequestHandle] = []
    running: list[RequestHandle] = []
    while len(handles) < len(jobs) or not engine.is_idle:
        running = [handle for handle in running if not handle.is_done]
        for job in jobs[len(handles) : len(handles) + most - len(running)]:
            handles.append(job.submit(engine))
            running.append(handles[-1])
        engine.step()
    return Trial(handles, time.perf_counter() - started_at, engine.metrics())


def run_open(
    engine: Engine, jobs: Sequence[Job], rate: float, rng: np.random.Generator
) -> Trial:
    """Jobs that arrive at random, `rate` a second on average."""
    if not rate > 0:
        raise ValueError(f"`rate` must be positive, got {rate}")
    arrivals = np.cumsum(rng.exponential(1 / rate, size=len(jobs)))
    engine.metrics(reset=True)
    started_at = time.perf_counter()
    handles: list[RequestHandle] = []
    while len(handles) < len(jobs) or not engine.is_idle:
        now = time.perf_counter() - started_at
        while len(handles) < len(jobs) and arrivals[len(handles)] <= now:
            handles.append(jobs[len(handles)].submit(engine))
        if not engine.step() and len(handles) < len(jobs):
            ahead = arrivals[len(handles)] - (time.perf_counter() - started_at)
            time.sleep(max(float(ahead), 0.0))
    return Trial(handles, time.perf_counter() - started_at, engine.metrics())
