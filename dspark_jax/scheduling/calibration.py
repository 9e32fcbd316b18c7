"""Sequential temperature scaling: confidences whose products are probabilities.

A confidence c_k = sigmoid(logit_k / T_k) estimates that slot k survives given that the
slots before did; their product estimates that the whole prefix does, and this product
is what a planner multiplies by its costs. Temperatures are fitted from left to right,
each to the calibration error of the product with the earlier ones fixed (paper 3.2.1).
They belong to one rule and one sampling temperature, which the file records.
"""

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from dspark_jax.scheduling import json_files, metrics, planner

MAX_POSITIONS = 1024  # more than any block has; a file with more is damaged


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibration:
    """Temperatures per slot, what they were fitted on and what they did.

    The first five fields are those that SGLang reads; it ignores the others.

    Attributes:
      temperatures: T_1..T_K, positive; 1 leaves a confidence as it is.
      dataset: what the texts were.
      num_samples: rounds the fit saw.
      ece_before, ece_after: calibration error of the survival at each slot, on rounds
        that the fit did not see where there are any; empty if unknown.
      rule: of verification; None if unknown (a file of another system).
      temperature: of sampling; None if unknown.
    """

    temperatures: tuple[float, ...]
    dataset: str = ""
    num_samples: int = 0
    ece_before: tuple[float, ...] = ()
    ece_after: tuple[float, ...] = ()
    rule: str | None = None
    temperature: float | None = None

    def __post_init__(self):
        if not self.temperatures:
            raise ValueError("`temperatures` must hold at least one value, got none")
        if not all(0 < t < float("inf") for t in self.temperatures):
            raise ValueError(
                f"`temperatures` must be positive and finite, got {self.temperatures}"
            )
        if self.num_samples < 0:
            raise ValueError(f"`num_samples` must be >= 0, got {self.num_samples}")
        for name in ("ece_before", "ece_after"):
            values = getattr(self, name)
            if values and len(values) != len(self.temperatures):
                raise ValueError(
                    f"`{name}` must have one value a slot, {len(self.temperatures)}, "
                    f"or none, got {len(values)}"
                )
            if not all(0 <= value <= 1 for value in values):
                raise ValueError(f"`{name}` must lie in [0, 1], got {values}")
        if self.temperature is not None and not 0 <= self.temperature < float("inf"):
            raise ValueError(f"`temperature` must be >= 0, got {self.temperature}")


def fit(
    confidence_logits: np.ndarray,
    num_accepted: np.ndarray,
    verify_length: np.ndarray,
    *,
    grid: np.ndarray | None = None,
    num_bins: int = metrics.NUM_BINS,
) -> tuple[float, ...]:
    """Temperatures T_1..T_K that calibrate the survival, slot by slot.

    At slot k it minimises the calibration error of prod_{i<=k} sigmoid(logit_i / T_i)
    against "k or more drafts were accepted", over the rounds that verified slot k; the
    first minimum of the grid wins. A slot that no round verified gets 1.

    Args:
      confidence_logits: [n, K], raw.
      num_accepted: int [n]; verify_length: int [n], full windows (a window that the
        confidences shorten would choose the rounds that they are judged by).
      grid: [m] positive temperatures; None takes `default_grid()`.

    Raises:
      ValueError: shapes that do not fit one another, counts out of range, or an empty
        or non-positive grid.

    References:
      DSpark (arXiv 2607.05147), section 3.2.1.
    """
    logits, accepted, verified = _check(confidence_logits, num_accepted, verify_length)
    grid = default_grid() if grid is None else np.asarray(grid, np.float64)
    if grid.ndim != 1 or not len(grid) or not np.all((grid > 0) & np.isfinite(grid)):
        raise ValueError(
            f"`grid` must be positive finite temperatures (m,), m >= 1, got {grid}"
        )
    before = np.ones(len(logits))  # survival up to the slot before
    temperatures = []
    for k in range(logits.shape[1]):
        is_seen = verified > k
        observed = accepted[is_seen] > k
        errors = [
            metrics.calibration_error(
                before[is_seen] * confidence(logits[is_seen, k], t), observed, num_bins
            )
            for t in grid
        ]
        best = float(grid[int(np.argmin(errors))]) if is_seen.any() else 1.0
        temperatures.append(best)
        before = before * confidence(logits[:, k], best)
    return tuple(temperatures)


def default_grid() -> np.ndarray:
    """201 temperatures from 0.1 to 10, evenly spaced in the logarithm; 1 is one."""
    return np.logspace(-1, 1, 201)


def confidence(logits: np.ndarray, temperature: Any = 1.0) -> np.ndarray:
    """sigmoid(logits / temperature), float64; a logit that is not finite gives 0."""
    logits = np.asarray(logits, np.float64)
    is_finite = np.isfinite(logits)
    scaled = np.where(is_finite, logits, 0.0) / np.asarray(temperature, np.float64)
    with np.errstate(over="ignore", under="ignore"):
        return np.where(is_finite, 1 / (1 + np.exp(-scaled)), 0.0)


def survival(
    confidence_logits: np.ndarray, temperatures: Sequence[float] | None = None
) -> np.ndarray:
    """Probabilities [n, K] that slots 1..k are all accepted; raw without temperatures.

    >>> survival(np.zeros((1, 3))).tolist()
    [[0.5, 0.25, 0.125]]
    """
    logits = np.asarray(confidence_logits, np.float64)
    if logits.ndim != 2:
        raise ValueError(
            f"`confidence_logits` must have shape (n, K), got {logits.shape}"
        )
    if temperatures is None:
        return np.cumprod(confidence(logits), axis=1)
    check_length(temperatures, logits.shape[1])
    scale = np.asarray(temperatures, np.float64)[None, : logits.shape[1]]
    return np.cumprod(confidence(logits, scale), axis=1)


def apply(confidence: np.ndarray, temperatures: Sequence[float]) -> np.ndarray:
    """Calibrated confidences [n, K], sigmoid(logit(c) / T_k), float64, of raw ones.

    One that is not finite gives 0; 0 and 1 stay what they are.

    >>> apply(np.array([[0.9, 0.5]]), (2.0, 2.0)).round(6).tolist()
    [[0.75, 0.5]]
    """
    raw = np.asarray(confidence, np.float64)
    if raw.ndim != 2:
        raise ValueError(f"`confidence` must have shape (n, K), got {raw.shape}")
    check_length(temperatures, raw.shape[1])
    raw = planner.finite(raw)
    scale = np.asarray(temperatures, np.float64)[None, : raw.shape[1]]
    with np.errstate(divide="ignore", over="ignore"):
        logits = np.log(raw) - np.log1p(-raw)  # -inf and inf for 0 and 1
        return 1 / (1 + np.exp(-logits / scale))


def check_fits(
    calibration: Calibration,
    *,
    draft_length: int,
    rule: str | None = None,
    temperature: float | None = None,
) -> None:
    """Raises ValueError unless a calibration is one for this use, naming what differs.

    Args:
      draft_length: K; a calibration of more slots serves its first K.
      rule, temperature: of verification and sampling; compared where both are known.
    """
    check_length(calibration.temperatures, draft_length)
    for name, wanted in (("rule", rule), ("temperature", temperature)):
        ours = getattr(calibration, name)
        if ours is not None and wanted is not None and ours != wanted:
            raise ValueError(
                f"`calibration` was fitted for {name} {ours!r}, not for {wanted!r}"
            )


def check_length(temperatures: Sequence[float], draft_length: int) -> None:
    """Raises ValueError unless there is a temperature for each of K slots."""
    if len(temperatures) < draft_length:
        raise ValueError(
            "`temperatures` must have one value a slot, at least "
            f"{draft_length}, got {len(temperatures)}"
        )


def write(path: str | os.PathLike, calibration: Calibration) -> None:
    """Writes the JSON that SGLang reads, with the rule and temperature, atomically."""
    values = dataclasses.asdict(calibration)
    json_files.write(path, {k: v for k, v in values.items() if v is not None})


def read(path: str | os.PathLike) -> Calibration:
    """Reads a calibration, ours or SGLang's, strictly.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it is not JSON, lacks `temperatures`, has an unknown key or a value
        out of range; the message names the file.
    """
    values = json_files.read(path)
    known = {field.name for field in dataclasses.fields(Calibration)}
    unknown = sorted(set(values) - known)
    if unknown:
        raise ValueError(f"{path}: unknown key {unknown[0]!r}; known: {sorted(known)}")
    if "temperatures" not in values:
        raise ValueError(f"{path} must hold the key 'temperatures'")
    for name in ("temperatures", "ece_before", "ece_after"):
        if name in values:
            values[name] = _numbers(path, name, values[name])
    for name, kinds in (
        ("dataset", str),
        ("num_samples", int),
        ("rule", str),
        ("temperature", (int, float)),
    ):
        value = values.get(name)
        if name in values and not (isinstance(value, kinds) and _is_sane(value)):
            raise ValueError(f"{path}: {name!r} has a wrong type: {value!r}"[:300])
    try:
        return Calibration(**values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _check(
    confidence_logits: np.ndarray, num_accepted: np.ndarray, verify_length: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    logits = np.asarray(confidence_logits, np.float64)
    accepted, verified = np.asarray(num_accepted), np.asarray(verify_length)
    if logits.ndim != 2:
        raise ValueError(
            f"`confidence_logits` must have shape (n, K), got {logits.shape}"
        )
    for name, array in (("num_accepted", accepted), ("verify_length", verified)):
        if array.shape != logits.shape[:1]:
            raise ValueError(
                f"`{name}` must have shape (n,) = ({len(logits)},), got {array.shape}"
            )
    if np.any(accepted < 0) or np.any(accepted > verified):
        raise ValueError("`num_accepted` must lie in 0..verify_length")
    if np.any(verified > logits.shape[1]):
        raise ValueError(
            f"`verify_length` must be at most K = {logits.shape[1]}, got "
            f"{int(verified.max())}"
        )
    return logits, accepted, verified


def _numbers(path: str | os.PathLike, name: str, value: Any) -> tuple[float, ...]:
    if not isinstance(value, list) or len(value) > MAX_POSITIONS:
        raise ValueError(
            f"{path}: {name!r} must be a list of at most {MAX_POSITIONS} numbers"
        )
    if not all(type(item) in (int, float) and _is_sane(item) for item in value):
        raise ValueError(f"{path}: {name!r} must hold numbers, got {value!r}"[:300])
    return tuple(float(item) for item in value)


def _is_sane(value: Any) -> bool:
    """No truth value, and no integer that is too long for a float."""
    if isinstance(value, int):
        return not isinstance(value, bool) and abs(value) < 2**63
    return True
