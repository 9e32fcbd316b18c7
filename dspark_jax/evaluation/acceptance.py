"""What recorded rounds say about acceptance: τ, by position, by window.

Conditional acceptance at slot k is accepted_k / reached_k: of the rounds that verified
slot k and had accepted all slots before, the share that accepted it too (the paper's
Figure 2). Prefix survival, accepted_k / rounds, also falls where slots before failed.
"""

import collections
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from dspark_jax.evaluation.prompts import ALL
from dspark_jax.evaluation.recording import Recording
from dspark_jax.scheduling import calibration

NUM_DRAWS = 2000
REPEATED_NGRAM = 20


class Acceptance(NamedTuple):
    """Acceptance over some prompts; intervals are 95 % bootstraps over prompts."""

    num_prompts: int
    num_rounds: int
    num_new_tokens: int
    accepted_length: float | None  # τ, pooled over rounds
    interval_95: tuple[float, float] | None
    conditional_acceptance: list[float | None]  # [K]
    conditional_interval_95: list[tuple[float, float] | None]  # [K]
    num_reached: list[int]  # [K]
    accepted_length_by_cap: list[float | None]  # [K], see `by_cap`
    repeated_20gram_share: float


class Window(NamedTuple):
    """What a confidence threshold makes of the recorded rounds."""

    threshold: float
    accepted_length: float  # τ
    num_verified_per_round: float
    num_rejected_per_round: float
    acceptance_rate: float  # (accepted + bonus) / (verified + 1), as the paper counts
    draft_acceptance_rate: float | None  # accepted / verified


def by_domain(
    recording: Recording, domains: Sequence[str], *, seed: int = 0
) -> dict[str, Acceptance]:
    """Acceptance of each domain, in the order they first occur, and of "all".

    Args:
      domains: of every prompt.
      seed: of the bootstrap.
    """
    if len(domains) != len(recording.new_tokens):
        raise ValueError(
            f"`domains` must name one of each of {len(recording.new_tokens)} prompts, "
            f"got {len(domains)}"
        )
    members: dict[str, list[int]] = {}
    for index, domain in enumerate(domains):
        members.setdefault(domain, []).append(index)
    members[ALL] = list(range(len(domains)))
    counts = _PromptCounts(recording)
    return {
        domain: _acceptance(recording, counts, np.asarray(chosen), seed)
        for domain, chosen in members.items()
    }


def mean_over_domains(domains: dict[str, Acceptance]) -> float | None:
    """The plain mean of the domains' τ; None if a domain has no rounds."""
    lengths = [a.accepted_length for name, a in domains.items() if name != ALL]
    known = [length for length in lengths if length is not None]
    return float(np.mean(known)) if known and len(known) == len(lengths) else None


def by_cap(recording: Recording, chosen: Any = slice(None)) -> list[float | None]:
    """τ if at most k = 1..K drafts of each recorded round had been verified.

    Given the round's anchor this is exact (for "block" in law): a shorter window keeps
    the accepted prefix up to its end. A loop with that window would begin other rounds,
    and a drafter that was asked for k slots may draft them a little differently; run
    one to measure it.
    """
    accepted = recording.num_accepted[chosen]
    whole = recording.accepted_sum[chosen]
    if not len(accepted):
        return [None] * recording.draft_length
    return [
        float(np.where(accepted <= k, whole, k + 1).mean())
        for k in range(1, recording.draft_length + 1)
    ]


def by_threshold(
    recording: Recording,
    thresholds: Sequence[float],
    temperatures: Sequence[float] | None = None,
) -> list[Window]:
    """Acceptance and tokens a round for windows that a threshold ends (Figure 5).

    Recomputed from rounds that verified full windows, exact at their anchors in the
    sense of `by_cap`; `window` reads the same numbers off a run that had a threshold.
    """
    if recording.confidence_logits is None:
        raise ValueError("`recording` holds no confidences: the drafter predicts none")
    logits = np.asarray(recording.confidence_logits, np.float64)
    scale = 1.0 if temperatures is None else np.asarray(temperatures)[: logits.shape[1]]
    confidence = calibration.confidence(logits, scale)
    rows = []
    for threshold in thresholds:
        kept = np.cumprod(confidence >= threshold, axis=1).sum(axis=1)
        verified = np.minimum(recording.verify_length, kept)
        accepted = np.minimum(recording.num_accepted, verified)
        whole = recording.num_accepted <= verified
        added = np.where(whole, recording.accepted_sum, verified + 1)
        rows.append(_window(threshold, verified, accepted, added))
    return rows


def window(recording: Recording, threshold: float) -> Window:
    """The same numbers of a run whose windows were the threshold's."""
    return _window(
        threshold,
        recording.verify_length,
        recording.num_accepted,
        recording.accepted_sum,
    )


def repeated_share(
    texts: Sequence[Sequence[int]], ngram: int = REPEATED_NGRAM
) -> float:
    """Share of tokens inside an n-gram that occurs twice in its text.

    A model that repeats itself is easy to draft for: read τ beside this share.
    """
    inside = total = 0
    for text in texts:
        tokens = [int(token) for token in text]
        grams = [tuple(tokens[i : i + ngram]) for i in range(len(tokens) - ngram + 1)]
        counts = collections.Counter(grams)
        marked = np.zeros(len(tokens), bool)
        for i, gram in enumerate(grams):
            if counts[gram] > 1:
                marked[i : i + ngram] = True
        inside, total = inside + int(marked.sum()), total + len(tokens)
    return inside / max(total, 1)


class _PromptCounts:
    """Sums over the rounds of each prompt: [prompts] and [prompts, K]."""

    def __init__(self, recording: Recording):
        size, length = len(recording.new_tokens), recording.draft_length
        self.rounds = np.bincount(recording.request, minlength=size)
        self.accepted_sum = np.bincount(
            recording.request, recording.accepted_sum, minlength=size
        )
        slots = np.arange(length)[None]
        accepted = recording.num_accepted[:, None]
        is_reached = slots < np.minimum(recording.verify_length[:, None], accepted + 1)
        self.reached = np.zeros((size, length), np.int64)
        self.accepted = np.zeros((size, length), np.int64)
        np.add.at(self.reached, recording.request, is_reached)
        np.add.at(self.accepted, recording.request, slots < accepted)


def _acceptance(
    recording: Recording, counts: _PromptCounts, chosen: np.ndarray, seed: int
) -> Acceptance:
    rounds, added = counts.rounds[chosen], counts.accepted_sum[chosen]
    reached, accepted = counts.reached[chosen], counts.accepted[chosen]
    # One resampling of prompts [draws, prompts], as weights.
    random = np.random.default_rng(seed)
    weights = random.multinomial(
        len(chosen), np.full(len(chosen), 1 / len(chosen)), size=NUM_DRAWS
    )
    if len(chosen) == 1:
        weights = weights[:0]  # one prompt has no spread
    texts = [recording.new_tokens[i] for i in chosen]
    return Acceptance(
        num_prompts=len(chosen),
        num_rounds=int(rounds.sum()),
        num_new_tokens=sum(map(len, texts)),
        accepted_length=_share(added.sum(), rounds.sum()),
        interval_95=_interval(weights @ added, weights @ rounds),
        conditional_acceptance=[
            _share(a, r) for a, r in zip(accepted.sum(0), reached.sum(0), strict=True)
        ],
        conditional_interval_95=[
            _interval(weights @ accepted[:, k], weights @ reached[:, k])
            for k in range(recording.draft_length)
        ],
        num_reached=[int(r) for r in reached.sum(0)],
        accepted_length_by_cap=by_cap(recording, np.isin(recording.request, chosen)),
        repeated_20gram_share=repeated_share(texts),
    )


def _share(part: Any, whole: Any) -> float | None:
    return float(part / whole) if whole else None


def _interval(part: np.ndarray, whole: np.ndarray) -> tuple[float, float] | None:
    is_known = whole > 0
    if not is_known.any():
        return None
    low, high = np.percentile(part[is_known] / whole[is_known], [2.5, 97.5])
    return float(low), float(high)


def _window(
    threshold: float, verified: np.ndarray, accepted: np.ndarray, added: np.ndarray
) -> Window:
    rounds = max(len(verified), 1)
    return Window(
        threshold=float(threshold),
        accepted_length=float(added.sum() / rounds),
        num_verified_per_round=float(verified.sum() / rounds),
        num_rejected_per_round=float((verified - accepted).sum() / rounds),
        acceptance_rate=float(added.sum() / (verified.sum() + rounds)),
        draft_acceptance_rate=_share(accepted.sum(), verified.sum()),
    )
