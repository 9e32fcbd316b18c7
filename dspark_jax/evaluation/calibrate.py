"""Calibration of a drafter by its own decoding: fitted on one half, judged on another.

The halves share no prompt. Where the prompts run out before there are rounds enough,
decoding goes on with new seeds, which needs a temperature above 0.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.evaluation import recording, reliability
from dspark_jax.evaluation.recording import Recording
from dspark_jax.evaluation.reliability import Reliability
from dspark_jax.scheduling import calibration
from dspark_jax.scheduling.calibration import Calibration


class Judged(NamedTuple):
    """A calibration, and how true it is on the rounds that it was not fitted on."""

    calibration: Calibration
    before: list[Reliability]  # raw, of the judging half
    after: list[Reliability]  # calibrated, of the judging half
    num_fitted: int  # rounds of each half
    num_judged: int
    num_fitted_at: list[int]  # [K], rounds that verified the slot
    num_judged_at: list[int]  # [K]
    num_reached_at: list[int]  # [K], of the judging half: all slots before accepted


def halves(domains: Sequence[str]) -> tuple[list[int], list[int]]:
    """Indices of the prompts to fit on and to judge by: every other one of a domain.

    Raises:
      ValueError: a half is empty.
    """
    sides: tuple[list[int], list[int]] = ([], [])
    seen: dict[str, int] = {}
    for index, domain in enumerate(domains):
        sides[seen.get(domain, 0) % 2].append(index)
        seen[domain] = seen.get(domain, 0) + 1
    if not sides[0] or not sides[1]:
        raise ValueError(
            "prompts must fill two halves: at least 2 of one domain, got "
            f"{len(domains)} in {len(seen)}"
        )
    return sides


def collect(
    record: Callable[[Sequence[int], jax.Array], Recording],
    prompts: Sequence[int],
    num_rounds: int,
    *,
    key: jax.Array,
    batch: int,
    is_random: bool,
    progress: Callable[[int, int], Any] | None = None,
) -> Recording:
    """Records rounds of these prompts, over and over, until there are `num_rounds`.

    Args:
      record: (indices of prompts, keys of them) -> their Recording.
      prompts: indices; each pass over them draws with keys of its own.
      key: one typed key; pass s of prompt i draws with fold_in(fold_in(key, s), i).
      batch: prompts a call.
      is_random: whether another seed gives another text; if not, one pass is all.
      progress: called with (rounds so far, rounds wanted).

    Returns:
      At least `num_rounds` rounds, or what one pass holds without randomness.

    Raises:
      ValueError: a pass added no round (every answer has one token).
    """
    parts: list[Recording] = []
    done = 0
    # One stream of (pass, prompt): a batch is full also where there are few prompts.
    for start in itertools.count(step=batch):
        places = range(start, start + batch)
        if not is_random:
            places = range(start, min(start + batch, len(prompts)))
        if not places:
            break
        passes, chosen = zip(
            *((p // len(prompts), prompts[p % len(prompts)]) for p in places),
            strict=True,
        )
        keys = _keys(key, jnp.asarray(passes), jnp.asarray(chosen))
        parts.append(record(chosen, keys))
        done += parts[-1].num_rounds
        if progress is not None:
            progress(min(done, num_rounds), num_rounds)
        if done >= num_rounds:
            break
        if done == 0 and start + batch >= len(prompts):
            raise ValueError("the prompts give no rounds: every answer ends at once")
    return recording.concatenate(parts)


def judge(
    fitted_on: Recording,
    judged_by: Recording,
    *,
    rule: str,
    temperature: float,
    dataset: str,
    seed: int = 0,
) -> Judged:
    """Fits temperatures on one recording and measures them on another.

    Args:
      fitted_on, judged_by: full windows of one drafter, rule and temperature.
      rule, temperature, dataset: recorded with the calibration.
      seed: of the ideal errors.

    Raises:
      ValueError: the drafter predicts no confidences.
    """
    if fitted_on.confidence_logits is None:
        raise ValueError("`fitted_on` holds no confidences: the drafter predicts none")
    temperatures = calibration.fit(
        fitted_on.confidence_logits, fitted_on.num_accepted, fitted_on.verify_length
    )
    before = reliability.by_slot(judged_by, seed=seed)
    after = reliability.by_slot(judged_by, temperatures, seed=seed)
    found = Calibration(
        temperatures=temperatures,
        dataset=dataset,
        num_samples=fitted_on.num_rounds,
        ece_before=_errors(before),
        ece_after=_errors(after),
        rule=rule,
        temperature=temperature,
    )
    slots = range(fitted_on.draft_length)
    reached = np.minimum(judged_by.verify_length, judged_by.num_accepted + 1)
    return Judged(
        calibration=found,
        before=before,
        after=after,
        num_fitted=fitted_on.num_rounds,
        num_judged=judged_by.num_rounds,
        num_fitted_at=[int((fitted_on.verify_length > k).sum()) for k in slots],
        num_judged_at=[slot.num_rounds for slot in before],
        num_reached_at=[int((reached > k).sum()) for k in slots],
    )


def _errors(slots: Sequence[Reliability]) -> tuple[float, ...]:
    """The error of every slot; nothing if no round verified one of them."""
    known = [slot.ece for slot in slots if slot.ece is not None]
    return tuple(known) if len(known) == len(slots) else ()


@jax.jit
def _keys(key: jax.Array, passes: jax.Array, prompts: jax.Array) -> jax.Array:
    def one(number: jax.Array, prompt: jax.Array) -> jax.Array:
        return jax.random.fold_in(jax.random.fold_in(key, number), prompt)

    return jax.vmap(one)(passes, prompts)
