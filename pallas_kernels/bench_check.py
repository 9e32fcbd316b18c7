"""`python -m pallas_kernels.bench --check`: every small case against the definition."""

import functools
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import cached_attention, cases
from pallas_kernels.cached_attention import tuning

# What a compiler or a peer may raise; a benchmark notes it and goes on.
FAILURES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


def checks(
    names: Sequence[str], chosen: Sequence[cases.CachedCase], deadline: float
) -> Iterator[dict[str, Any]]:
    """One record for every case, implementation and setting."""
    for case in chosen:
        inputs = cases.cached_inputs(case)
        wide = [
            x.astype(jnp.float32) for x in (inputs.query, inputs.keys, inputs.values)
        ]
        reference = call_of(case, inputs, implementation="xla", config=None)
        wanted = np.asarray(jax.jit(reference)(*wide))
        for name in names:
            for config in _check_configs(name, case):
                if time.monotonic() > deadline:
                    return
                row: dict[str, Any] = {"case": case.name, "kind": case.kind}
                row |= {"implementation": name, "config": repr(config)}
                yield row | _check(case, inputs, wanted, name, config)


def relative_error(out: Any, wanted: Any) -> float:
    """||out - wanted|| / ||wanted||."""
    out, wanted = np.asarray(out, np.float32), np.asarray(wanted, np.float32)
    return float(np.linalg.norm(out - wanted) / np.linalg.norm(wanted))


def call_of(
    case: cases.CachedCase, inputs: cases.CachedInputs, **more: Any
) -> Callable[..., jax.Array]:
    """The case's function of (query, keys, values)."""
    function = getattr(cached_attention, f"{case.kind}_attention")
    return functools.partial(function, **inputs.arguments, **more)


def _check_configs(name: str, case: cases.CachedCase) -> list[Any]:
    if name != "mosaic_gpu":
        return [None]
    if case.width == 256:
        make = functools.partial(tuning.MosaicGpuConfig, stages=1)
        return [None, make(max_parts=1), make(max_parts=3)]
    make = functools.partial(tuning.MosaicGpuConfig, warpgroups=2)
    more = []
    if case.name == "ragged":
        more = [
            make(max_parts=20, workers=7),
            make(max_parts=3, warpgroups=1),
        ]
    return [None, make(max_parts=1), make(max_parts=3), *more]  # None: by the table


def _check(
    case: cases.CachedCase,
    inputs: cases.CachedInputs,
    wanted: np.ndarray,
    name: str,
    config: Any,
) -> dict[str, Any]:
    try:
        call = call_of(case, inputs, implementation=name, config=config)
        out = np.asarray(jax.jit(call)(inputs.query, inputs.keys, inputs.values))
    except NotImplementedError as refusal:
        return {"refused": str(refusal)}
    except FAILURES:
        return {"error": traceback.format_exc()[-3000:]}
    error = relative_error(out, wanted)
    bound = 8e-3 if case.dtype != "float32" else 1e-5
    return {"relative_error": error, "is_wrong": not error <= bound}
