"""Benchmarks without trained weights: real work, scripted words, replayed acceptance.

Random weights at a large model's shapes cost what trained ones cost, but their words
mean nothing and no draft would ever be accepted. Here the target's likeliest token is
made a known function of the position, and the drafter proposes it with probability c,
another token otherwise; c is also the confidence. Slot by slot, c is drawn from a beta
distribution whose mean is the conditional acceptance that was measured and whose spread
gives the measured AUROC. Everything that a step computes is still computed.

Only greedy decoding is meant: it compares tokens, so that nothing but these wrappers
knows of the script, and all modes of an engine commit the same words. The confidences
are calibrated by construction, and independent from slot to slot and round to round;
real ones are less helpful, which a result made with this must say.
"""

import dataclasses
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax import noise
from dspark_jax.scheduling import json_files
from dspark_jax.types import Bound, Drafter, Target

PERIOD = 251  # of the script: whole numbers below 256 are exact in bfloat16
_QUANTILES = 128
_BONUS = 1e6  # on the scripted token's logit


@dataclasses.dataclass(frozen=True)
class Replay:
    """Acceptance to replay.

    Attributes:
      domains: their names; a request of seed s is of domain s modulo their number.
      conditional_acceptance: [domains][K].
      concentration: alpha + beta of the beta distributions; large: no spread.
    """

    domains: tuple[str, ...]
    conditional_acceptance: tuple[tuple[float, ...], ...]
    concentration: float

    @property
    def draft_length(self) -> int:
        return len(self.conditional_acceptance[0])

    def quantiles(self) -> np.ndarray:
        """float32 [domains, K, Q]: confidences at evenly spaced quantiles."""
        rows = [
            [beta_quantiles(mean, self.concentration) for mean in of_domain]
            for of_domain in self.conditional_acceptance
        ]
        return np.asarray(rows, np.float32)


def read(
    calibration: str | os.PathLike, evaluation: str | os.PathLike | None = None
) -> Replay:
    """Acceptance as `dspark calibrate --json` (and `evaluate --json`) measured it.

    Args:
      calibration: gives the spread of the confidences, by the AUROC of slot 1, and the
        conditional acceptance.
      evaluation: gives the conditional acceptance by domain instead.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it lacks what is needed, with the file's name.
    """
    values = json_files.read(calibration)
    try:
        reached = [float(n) for n in values["num_reached_at"]]
        slots = values["before"]["slots"]
        auroc = float(slots[0]["auroc"])
        accepted = [s["num_rounds"] * s["accepted_share"] for s in slots]
        shares = [a / r for a, r in zip(accepted, reached, strict=True)]
    except (KeyError, IndexError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ValueError(
            f"{calibration} must be the JSON of `dspark calibrate --json`: {error!r}"
        ) from error
    if not 0.5 <= auroc < 1 or not all(0 < share < 1 for share in shares):
        raise ValueError(
            f"{calibration}: acceptance must lie in (0, 1) and the AUROC in [0.5, 1), "
            f"got {shares} and {auroc}"
        )
    concentration = fit_concentration(shares[0], auroc)
    by_domain: dict[str, list[float]] = {"all": shares}
    if evaluation is not None:
        by_domain = _by_domain(evaluation, len(shares))
    return Replay(
        domains=tuple(by_domain),
        conditional_acceptance=tuple(tuple(map(float, x)) for x in by_domain.values()),
        concentration=concentration,
    )


def make_models(
    target: Target, drafter: Drafter, replay: Replay
) -> tuple[Target, Drafter]:
    """The same models with scripted words and replayed acceptance (greedy only)."""
    if drafter.config.block_size > replay.draft_length:
        raise ValueError(
            f"`replay` has {replay.draft_length} slots, but the drafter drafts "
            f"{drafter.config.block_size}"
        )
    scripted = target._replace(
        forward=Bound(_forward, (target,)), unembed=Bound(_unembed, (target,))
    )
    return scripted, drafter._replace(propose=Bound(_propose, (drafter, replay)))


def script(position: Any) -> Any:
    """The token at a position, 0..PERIOD-1."""
    return (position * 7 + 3) % PERIOD


def beta_quantiles(mean: float, concentration: float) -> np.ndarray:
    """Q values of a beta distribution, one at the middle of each of Q equal parts."""
    grid, mass = _beta(mean, concentration)
    middles = (np.arange(_QUANTILES) + 0.5) / _QUANTILES
    found = np.interp(middles, np.cumsum(mass), grid)
    return np.clip(found + mean - found.mean(), 1e-4, 1 - 1e-4)


def fit_concentration(mean: float, auroc: float) -> float:
    """The concentration at which calibrated confidences have this AUROC."""
    low, high = np.log(0.05), np.log(1e4)
    for _ in range(60):
        middle = (low + high) / 2
        grid, mass = _beta(mean, float(np.exp(middle)))
        accepted, refused = grid * mass / mean, (1 - grid) * mass / (1 - mean)
        below = np.cumsum(refused) - refused / 2
        low, high = (middle, high) if accepted @ below > auroc else (low, middle)
    return float(np.exp(low))


def _beta(mean: float, concentration: float) -> tuple[np.ndarray, np.ndarray]:
    """Points and probabilities of a beta distribution on a fine grid."""
    grid = (np.arange(4000) + 0.5) / 4000
    a, b = mean * concentration, (1 - mean) * concentration
    log_density = (a - 1) * np.log(grid) + (b - 1) * np.log1p(-grid)
    mass = np.exp(log_density - log_density.max())
    return grid, mass / mass.sum()


def _by_domain(path: str | os.PathLike, length: int) -> dict[str, list[float]]:
    try:
        domains = json_files.read(path)["runs"][0]["domains"]
        found = {
            name: [float(x) for x in of_domain["conditional_acceptance"]]
            for name, of_domain in domains.items()
            if name != "all"
        }
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{path} must be the JSON of `dspark evaluate --json`: {error!r}"
        ) from error
    is_right = all(
        len(x) == length and 0 < min(x) <= max(x) < 1 for x in found.values()
    )
    if not found or not is_right:
        raise ValueError(
            f"{path} must give {length} conditional acceptances in (0, 1) a domain, "
            f"got {found}"
        )
    return found


def _forward(target, params, tokens, positions, cache, *, tap_layers=()):
    """The target's pass, and the scripted next token as one more channel."""
    hidden, taps, cache = target.forward(
        params, tokens, positions, cache, tap_layers=tap_layers
    )
    following = script(positions + 1).astype(hidden.dtype)[..., None]
    return jnp.concatenate([hidden, following], axis=-1), taps, cache


def _unembed(target, params, hidden):
    logits = target.unembed(params, hidden[..., :-1])
    ids = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    is_scripted = ids == hidden[..., -1:].astype(jnp.int32)
    return logits + jnp.where(is_scripted, jnp.float32(_BONUS), jnp.float32(0))


def _propose(drafter, replay, params, target_params, state, anchor, position, sampler):
    """The drafter's own block, its tokens and confidences then replaced."""
    draft, state = drafter.propose(
        params, target_params, state, anchor, position, sampler
    )
    length = draft.tokens.shape[1]
    accepts = noise.round_streams(sampler.key, position, length, noise.ACCEPT)
    levels = noise.round_streams(sampler.key, position, length, noise.DRAFT)
    words = jax.random.key_data(sampler.key).astype(jnp.uint32)
    domain = (words[:, 1] % jnp.uint32(len(replay.domains))).astype(jnp.int32)
    level = (noise.round_uniform(levels) * _QUANTILES).astype(jnp.int32)  # [B, K]
    slots = jnp.arange(length, dtype=jnp.int32)[None]
    confidence = jnp.asarray(replay.quantiles())[domain[:, None], slots, level]
    following = script(position[:, None] + 1 + slots)
    is_right = noise.round_uniform(accepts) < confidence
    tokens = jnp.where(is_right, following, (following + 1) % PERIOD)
    # What the drafter found is kept where it cannot be, so that no compiler may drop
    # the work that found it.
    tokens = jnp.where(draft.tokens < 0, draft.tokens, tokens)
    logits = jnp.log(confidence) - jnp.log1p(-confidence)
    if draft.confidence_logits is not None:
        is_impossible = draft.confidence_logits > jnp.float32(3e38)
        logits = jnp.where(is_impossible, draft.confidence_logits, logits)
    return draft.replace(tokens=tokens, confidence_logits=logits), state
