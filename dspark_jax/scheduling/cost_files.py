"""Cost tables on disk: SGLang's two JSON forms, and ours, which knows the context.

Form A (`sample_batch_tokens`, `sample_steps_per_sec`, `max_batch_tokens`) is a
`TokenCurve`; form B (`bias_seconds`, `bs_probes`, `alpha_seconds`, `m_probes`,
`theta_seconds`) an `Additive` without context. Form C has the key `form` =
"dspark_jax.costs" and holds both surfaces of `Costs`, and what was measured where.
Reading is strict: an unknown key or a wrong value is an error that names the file.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from dspark_jax.scheduling import json_files, probes
from dspark_jax.scheduling.costs import (
    Additive,
    Costs,
    Grid,
    Plane,
    Surface,
    TokenCurve,
)

FORM = "dspark_jax.costs"
VERSION = 1
MAX_PLANES = 256
FORM_A = ("sample_batch_tokens", "sample_steps_per_sec", "max_batch_tokens")
FORM_B = ("bias_seconds", "bs_probes", "alpha_seconds", "m_probes", "theta_seconds")


def read(path: str | os.PathLike) -> Costs:
    """Reads a cost table of any of the three forms.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it is damaged or of none of the forms; the message names the file.
    """
    values = json_files.read(path)
    try:
        if "form" in values:
            return _read_ours(values)
        if "bias_seconds" in values:
            return Costs(drafting=_read_additive(values))
        if "sample_batch_tokens" in values:
            return Costs(drafting=_read_curve(values))
        raise ValueError(
            "a cost table must have the key 'form', 'bias_seconds' or "
            f"'sample_batch_tokens', got {probes.shortened(sorted(values))}"
        )
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def write(path: str | os.PathLike, costs: Costs) -> None:
    """Writes form C, atomically: everything that `costs` holds.

    Raises:
      TypeError: a surface that is not one of this package's.
    """
    values: dict[str, Any] = {"form": FORM, "version": VERSION, **_info_values(costs)}
    values["drafting"] = _surface_values(costs.drafting)
    if costs.plain is not None:
        values["plain"] = _surface_values(costs.plain)
    json_files.write(path, values)


def write_curve(
    path: str | os.PathLike,
    costs: Surface,
    packed_tokens: Sequence[int],
    *,
    requests: int = 1,
    context_tokens: float = 0,
) -> None:
    """Writes form A, read off any costs at these probes, atomically."""
    seconds = costs.seconds(requests, packed_tokens, context_tokens)
    curve = TokenCurve(
        packed_tokens=tuple(packed_tokens),
        step_seconds=tuple(seconds.tolist()),
        max_tokens=packed_tokens[-1],
    )
    json_files.write(path, _curve_values(curve))


def write_additive(
    path: str | os.PathLike, costs: Additive, *, context_tokens: float = 0
) -> None:
    """Writes form B, atomically; the context's share at `context_tokens` goes to t0."""
    values = _additive_values(costs)
    values["bias_seconds"] += values.pop("context_seconds") * context_tokens
    json_files.write(path, values)


def _read_ours(values: Mapping[str, Any]) -> Costs:
    if values["form"] != FORM:
        raise ValueError(
            f"'form' must be {FORM!r}, got {probes.shortened(values['form'])}"
        )
    known = ("form", "version", "drafting", "plain", "info")
    _check_keys(values, known, ("version", "drafting"))
    if values["version"] != VERSION:
        raise ValueError(
            f"'version' must be {VERSION}, got {probes.shortened(values['version'])}"
        )
    info = values.get("info", {})
    if not isinstance(info, dict):
        raise ValueError(f"'info' must be an object, got {probes.shortened(info)}")
    plain = values.get("plain")
    return Costs(
        drafting=_read_surface("drafting", values["drafting"]),
        plain=None if plain is None else _read_surface("plain", plain),
        info=info,
    )


def _read_surface(name: str, values: Any) -> Surface:
    if not isinstance(values, dict):
        raise ValueError(f"{name!r} must be an object, got {probes.shortened(values)}")
    try:
        if "planes" in values:
            _check_keys(values, ("planes",), ())
            return _read_grid(values["planes"])
        if "bias_seconds" in values:
            return _read_additive(values, ("context_seconds",))
        if "sample_batch_tokens" in values:
            return _read_curve(values)
    except ValueError as error:
        raise ValueError(f"{name!r}: {error}") from error
    raise ValueError(
        f"{name!r} must have the key 'planes', 'bias_seconds' or "
        f"'sample_batch_tokens', got {probes.shortened(sorted(values))}"
    )


def _read_grid(values: Any) -> Grid:
    if not isinstance(values, list) or len(values) > MAX_PLANES:
        raise ValueError(f"'planes' must be a list of at most {MAX_PLANES} objects")
    planes = []
    keys = ("requests", "packed_tokens", "context_tokens", "seconds")
    for plane in values:
        if not isinstance(plane, dict):
            raise ValueError(
                f"'planes' must hold objects, got {probes.shortened(plane)}"
            )
        _check_keys(plane, keys, keys)
        rows = _list("seconds", plane["seconds"])
        planes.append(
            Plane(
                requests=plane["requests"],
                packed_tokens=tuple(_list("packed_tokens", plane["packed_tokens"])),
                context_tokens=tuple(_list("context_tokens", plane["context_tokens"])),
                step_seconds=tuple(tuple(_list("seconds", row)) for row in rows),
            )
        )
    return Grid(planes=tuple(planes))


def _read_additive(values: Mapping[str, Any], optional: Sequence[str] = ()) -> Additive:
    _check_keys(values, (*FORM_B, *optional), FORM_B)
    return Additive(
        bias_seconds=values["bias_seconds"],
        requests=tuple(_list("bs_probes", values["bs_probes"])),
        alpha_seconds=tuple(_list("alpha_seconds", values["alpha_seconds"])),
        packed_tokens=tuple(_list("m_probes", values["m_probes"])),
        theta_seconds=tuple(_list("theta_seconds", values["theta_seconds"])),
        context_seconds=values.get("context_seconds", 0.0),
    )


def _read_curve(values: Mapping[str, Any]) -> TokenCurve:
    _check_keys(values, FORM_A, FORM_A)
    speeds = _list("sample_steps_per_sec", values["sample_steps_per_sec"])
    if not all(type(speed) in (int, float) and speed > 0 for speed in speeds):
        raise ValueError(
            f"'sample_steps_per_sec' must hold positive numbers, got "
            f"{probes.shortened(speeds)}"
        )
    return TokenCurve(
        packed_tokens=tuple(_list("sample_batch_tokens", values[FORM_A[0]])),
        step_seconds=tuple(1 / speed for speed in speeds),
        max_tokens=values["max_batch_tokens"],
    )


def _surface_values(surface: Surface) -> dict[str, Any]:
    match surface:
        case TokenCurve():
            return _curve_values(surface)
        case Additive():
            return _additive_values(surface)
        case Grid():
            return {"planes": [_plane_values(plane) for plane in surface.planes]}
    raise TypeError(
        "`costs` must hold a TokenCurve, an Additive or a Grid, got "
        f"{type(surface).__name__}"
    )


def _curve_values(curve: TokenCurve) -> dict[str, Any]:
    speeds = [1 / seconds for seconds in curve.step_seconds]
    values = (list(curve.packed_tokens), speeds, curve.max_tokens)
    return dict(zip(FORM_A, values, strict=True))


def _additive_values(costs: Additive) -> dict[str, Any]:
    return {
        "bias_seconds": costs.bias_seconds,
        "bs_probes": list(costs.requests),
        "alpha_seconds": list(costs.alpha_seconds),
        "m_probes": list(costs.packed_tokens),
        "theta_seconds": list(costs.theta_seconds),
        "context_seconds": costs.context_seconds,
    }


def _plane_values(plane: Plane) -> dict[str, Any]:
    return {
        "requests": plane.requests,
        "packed_tokens": list(plane.packed_tokens),
        "context_tokens": list(plane.context_tokens),
        "seconds": [list(row) for row in plane.step_seconds],
    }


def _info_values(costs: Costs) -> dict[str, Any]:
    return {"info": dict(costs.info)} if costs.info else {}


def _check_keys(
    values: Mapping[str, Any], known: Sequence[str], needed: Sequence[str]
) -> None:
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise ValueError(f"unknown key {unknown[0]!r}; known: {sorted(known)}")
    for name in needed:
        if name not in values:
            raise ValueError(f"must hold the key {name!r}")


def _list(name: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{name!r} must be a list, got {probes.shortened(value)}")
    return value
