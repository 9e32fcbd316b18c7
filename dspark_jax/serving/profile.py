"""What the steps of an engine cost on this device: its cost table, measured.

Every compiled shape is run as the engine runs it, several steps in a row, at several
context lengths. Repeats go round all shapes, so that a busy moment of the machine does
not fall on one of them alone; the median of them counts.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from dspark_jax.scheduling import cost_fit
from dspark_jax.scheduling.costs import Additive, Costs, Grid, Plane
from dspark_jax.serving.engine import Engine


class Measured(NamedTuple):
    """Seconds of a round: the median of the repeats, the fastest and the slowest."""

    requests: int
    packed_tokens: int
    context_tokens: int  # of all requests together
    is_drafting: bool
    seconds: float
    fastest: float
    slowest: float


def measure_steps(
    engine: Engine,
    context_lengths: Sequence[int],
    *,
    num_steps: int = 8,
    repeats: int = 5,
    progress: Callable[[int, int], None] | None = None,
) -> list[Measured]:
    """Times rounds of all buckets of an idle, warmed-up engine at these contexts.

    Args:
      context_lengths: tokens of each request, increasing.
      num_steps: steps in a row for one time.
      repeats: times of each shape.
      progress: called with (done, total) times.
    """
    if repeats < 1:
        raise ValueError(f"`repeats` must be at least 1, got {repeats}")
    if not context_lengths or list(context_lengths) != sorted({*context_lengths}):
        raise ValueError(
            "`context_lengths` must be strictly increasing, at least one, got "
            f"{list(context_lengths)}"
        )
    shapes = [(b, length) for b in engine.buckets for length in context_lengths]
    times = np.empty((repeats, len(shapes)))
    for repeat in range(repeats):
        for number, (bucket, length) in enumerate(shapes):
            seconds = engine.measure(bucket, length, num_steps=num_steps)
            times[repeat, number] = seconds
            if progress is not None:
                progress(repeat * len(shapes) + number + 1, times.size)
    return [
        Measured(
            requests=bucket.requests,
            packed_tokens=bucket.tokens,
            context_tokens=bucket.requests * length,
            is_drafting=not bucket.is_plain,
            seconds=float(np.median(column)),
            fastest=float(column.min()),
            slowest=float(column.max()),
        )
        for (bucket, length), column in zip(shapes, times.T, strict=True)
    ]


def make_costs(
    measured: Sequence[Measured], info: Mapping[str, Any], *, is_fastest: bool = False
) -> Costs:
    """The cost table of measured steps.

    Args:
      measured: from `measure_steps`.
      info: what was measured where; kept in the table.
      is_fastest: takes the fastest time of each shape, not the median: for a machine
        that others use too.

    Raises:
      ValueError: no step drafts.
    """
    if is_fastest:
        measured = [step._replace(seconds=step.fastest) for step in measured]
    drafting = [step for step in measured if step.is_drafting]
    plain = [step for step in measured if not step.is_drafting]
    if not drafting:
        raise ValueError("`measured` must have a step that drafts")
    return Costs(
        drafting=_grid(drafting), plain=_grid(plain) if plain else None, info=info
    )


def additive_model(grid: Grid) -> tuple[Additive, float]:
    """The additive model nearest to measured steps, and its worst relative error."""
    steps = [
        (plane.requests, tokens, context, seconds)
        for plane in grid.planes
        for tokens, row in zip(plane.packed_tokens, plane.step_seconds, strict=True)
        for context, seconds in zip(plane.context_tokens, row, strict=True)
    ]
    requests, tokens, context, seconds = map(np.array, zip(*steps, strict=True))
    model = cost_fit.fit_additive(requests, tokens, context, seconds)
    found = [float(model.seconds(*step[:3])) / step[3] for step in steps]
    return model, max(abs(ratio - 1) for ratio in found)


def default_context_lengths(engine: Engine, num_steps: int = 8) -> tuple[int, ...]:
    """A sixteenth, a quarter and all of the context that leaves room for the steps."""
    most = engine.max_measured_context(num_steps)
    return tuple(sorted({max(most // 16, 1), max(most // 4, 1), most}))


def _grid(steps: Sequence[Measured]) -> Grid:
    planes = []
    for requests in sorted({step.requests for step in steps}):
        seconds = {
            (step.packed_tokens, step.context_tokens): step.seconds
            for step in steps
            if step.requests == requests
        }
        tokens, context = (
            tuple(sorted({*axis})) for axis in zip(*seconds, strict=True)
        )
        rows = tuple(tuple(seconds[t, c] for c in context) for t in tokens)
        planes.append(
            Plane(
                requests=requests,
                packed_tokens=tokens,
                context_tokens=context,
                step_seconds=rows,
            )
        )
    return Grid(planes=tuple(planes))
