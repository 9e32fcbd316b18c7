"""`cached_attention` on the CPU: the definition, and both dialects' interpreters."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import _compat, cached_attention, cases
from pallas_kernels.cached_attention import mosaic_gpu, mosaic_tpu, tuning

pytestmark = pytest.mark.usefixtures("quick_compilation")

ids = [f"{case.kind}: {case.name}" for case in cases.SMALL]
everything = (*cases.SMALL, *cases.FLOAT32)
BOUND = {"bfloat16": 8e-3, "float32": 2e-6}


def run(case, **more):
    found = cases.cached_inputs(case)
    function = getattr(cached_attention, f"{case.kind}_attention")
    static = (
        {"max_rows": found.arguments.pop("max_rows")} if case.kind == "verify" else {}
    )
    static |= {"window": found.arguments.pop("window")} | more
    out = jax.jit(functools.partial(function, **static))(
        found.query, found.keys, found.values, **found.arguments
    )
    return out.reshape(-1, case.heads, case.width)


def expected(case):
    """Row by row in float64, and which rows exist."""
    found = cases.cached_inputs(case)
    arguments = found.arguments
    wide = [np.asarray(x, np.float64) for x in (found.query, found.keys, found.values)]
    query, keys, values = wide[0].reshape(-1, case.heads, case.width), *wide[1:]
    num_keys = np.asarray(arguments["num_keys"])
    if case.kind == "block":
        num_keys = np.repeat(num_keys, case.rows)
        slots = np.repeat(np.arange(len(case.lengths)), case.rows)
    else:
        slots = np.asarray(arguments["slots"])
    out = np.zeros_like(query)
    for row, (slot, count) in enumerate(zip(slots, num_keys, strict=True)):
        if slot < 0 or count == 0:
            continue
        positions = np.arange(max(count - (case.window or count), 0), count)
        if case.page is None:
            k, v = keys[slot][:, positions], values[slot][:, positions]
        else:
            pages = np.asarray(arguments["page_table"])[slot, positions // case.page]
            k, v = (
                np.swapaxes(x[pages, :, positions % case.page], 0, 1)
                for x in (keys, values)
            )
        for head in range(case.heads):
            group = head // (case.heads // case.kv_heads)
            score = k[group] @ query[row, head] * case.width**-0.5
            weight = np.exp(score - score.max())
            out[row, head] = weight / weight.sum() @ v[group]
    return out


def check(out, case):
    wanted = expected(case)
    found = np.asarray(out, np.float64)
    assert np.all(np.isfinite(found))
    assert np.linalg.norm(found - wanted) <= BOUND[case.dtype] * np.linalg.norm(wanted)
    np.testing.assert_array_equal(found[~wanted.any(axis=(1, 2))], 0)


@pytest.mark.parametrize("case", everything, ids=lambda c: f"{c.kind} {c.name}")
def test_xla_equals_the_definition(case):
    check(run(case, implementation="xla"), case)


def interpreted(monkeypatch, module, **parameters):
    attend = module.attend
    monkeypatch.setattr(
        module, "attend", lambda *args, **kwargs: attend(*args, **kwargs, **parameters)
    )


# A part of them is enough for a quick look: every other case is marked slow.
TPU = [
    pytest.param(
        case,
        id=f"{case.kind} {case.name}",
        marks=pytest.mark.slow if number % 2 else [],
    )
    for number, case in enumerate(everything)
]


@pytest.mark.parametrize("case", TPU)
def test_tpu_interpreter_equals_the_definition(case, monkeypatch):
    interpreted(monkeypatch, mosaic_tpu, interpret=True)
    config = tuning.MosaicTpuConfig(key_tile=128, max_rows=48)
    check(run(case, implementation="mosaic_tpu", config=config), case)


def test_tpu_interpreter_with_its_memory(monkeypatch):
    interpreted(monkeypatch, mosaic_tpu, interpret=pltpu.InterpretParams())
    for case in cases.SMALL:
        if case.name == "pages of 64" and case.kind == "verify":
            check(run(case, implementation="mosaic_tpu"), case)


needs_mosaic_gpu = pytest.mark.skipif(
    _compat.mosaic_gpu_missing() is not None, reason=str(_compat.mosaic_gpu_missing())
)
# A part of them: the interpreter takes seconds a case. The rest is marked slow.
QUICK = {
    "block: ragged": "shares",
    "block: empty and one": "shares",
    "block: window": "shares, one warpgroup",
    "block: two tiles of rows": "shares",
    "block: three heads, odd capacity": "whole",
    "block: pages of 16": "shares",
    "verify: ragged": "shares",
    "verify: pages of 64": "whole",
}
PARTS = {
    "whole": {"max_parts": 1, "workers": 2, "warpgroups": 2},
    "shares": {"max_parts": 3, "workers": 5, "warpgroups": 2},
    "shares, one warpgroup": {"max_parts": 3, "workers": 5, "warpgroups": 1},
}
INTERPRETED = [
    pytest.param(
        case,
        parts,
        id=f"{case.kind} {case.name}, {parts}",
        marks=[]
        if QUICK.get(f"{case.kind}: {case.name}") == parts
        else pytest.mark.slow,
    )
    for case in cases.SMALL
    for parts in PARTS
]


@needs_mosaic_gpu
@pytest.mark.parametrize(("case", "parts"), INTERPRETED)
def test_gpu_interpreter_equals_the_definition(case, parts, monkeypatch):
    interpreted(monkeypatch, mosaic_gpu, interpret=_compat.gpu_interpreter())
    config = tuning.MosaicGpuConfig(stages=2, **PARTS[parts])
    if case.width == 256:
        config = dataclasses.replace(config, stages=1, warpgroups=1)
    check(run(case, implementation="mosaic_gpu", config=config), case)
