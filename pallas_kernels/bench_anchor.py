"""Times `anchor_attention`, forward and backward, and flex_attention of torch.

The figures of memory are those of the compiled program (temporaries) and, for torch,
the peak above what was allocated before.
"""

import dataclasses
import itertools
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import bench_check, bench_peers, bench_timing, cases
from pallas_kernels.anchor_attention import anchor_attention, tuning

DIFFERENTIATED = ("query", "keys", "values", "own_keys", "own_values")


def results(
    arguments: Any,
    names: Sequence[str],
    peers: Sequence[str],
    chosen: Sequence[cases.AnchorCase],
    deadline: float,
) -> Iterator[dict[str, Any]]:
    """One record for every case, implementation and number of anchors at a time."""
    swept = {"anchors": [tuning.ChunksConfig().anchors], "skips_context": [1]}
    for field in arguments.config:
        key, _, values = field.partition("=")
        if key not in swept:
            raise SystemExit(
                f"--config: anchor_attention has {', '.join(swept)}, got {key}"
            )
        swept[key] = [int(value) for value in values.split(",")]
    configs = [
        tuning.ChunksConfig(anchors, bool(skips))
        for anchors, skips in itertools.product(*swept.values())
    ]
    for case in chosen:
        jobs: list[tuple[str, tuning.ChunksConfig | None]] = [
            (name, config) for name in names for config in configs
        ]
        for name, config in [*jobs, *((peer, None) for peer in peers)]:
            if time.monotonic() > deadline:
                return
            row: dict[str, Any] = {"case": case.name, "implementation": name}
            row["config"] = None if config is None else dataclasses.asdict(config)
            started = time.monotonic()
            try:
                if config is None:
                    row |= PEERS[name](case, arguments.repetitions)
                else:
                    row |= _time(case, name, config, arguments.repetitions)
            except NotImplementedError as refusal:
                row["refused"] = str(refusal)
            except bench_check.FAILURES:
                row["error"] = traceback.format_exc()[-3000:]
            row["took_s"] = round(time.monotonic() - started, 2)
            yield row


def _time(
    case: cases.AnchorCase,
    name: str,
    config: tuning.ChunksConfig,
    repetitions: int,
) -> dict[str, Any]:
    inputs = cases.anchor_inputs(case, draw=cases.drawn_on_device)
    arrays = {key: inputs[key] for key in DIFFERENTIATED}
    num_context = inputs["num_context"]

    def forward(arrays: dict[str, jax.Array]) -> jax.Array:
        return anchor_attention(
            **arrays, num_context=num_context, implementation=name, config=config
        )

    def step(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
        # The gradients are the next arguments, scaled to stay of one size.
        out, pull = jax.vjp(forward, arrays)
        (slopes,) = pull(out)
        return jax.tree.map(
            lambda x, y: (x + y * jnp.asarray(1e-3, y.dtype)).astype(x.dtype),
            arrays,
            slopes,
        )

    def again(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return arrays | {"query": forward(arrays)}

    both = jax.jit(step).lower(arrays).compile()
    only = jax.jit(again).lower(arrays).compile()
    timings = [
        bench_timing.chained(run, arrays, calls=1, repetitions=repetitions)
        for run in (both, only)
    ]
    memory = both.memory_analysis()
    return timings[0].microseconds() | {
        "forward_us": round(timings[1].median * 1e6, 2),
        "temporary_mb": round(memory.temp_size_in_bytes / 1e6, 1) if memory else None,
    }


def _torch_flex(case: cases.AnchorCase, repetitions: int) -> dict[str, Any]:
    bench_peers.need_torch()
    import torch
    from torch.nn.attention import flex_attention as flex

    rows, length = case.anchors * case.slots, case.length
    places = torch.randperm(length, device="cuda")[: case.anchors].sort().values

    def mask(batch: Any, head: Any, row: Any, key: Any) -> Any:
        block = row // case.slots
        own = (key >= length) & ((key - length) // case.slots == block)
        return ((key < length) & (key < places[block])) | own

    def draw(heads: int, size: int) -> Any:
        shape = (1, heads, size, case.width)
        dtype = getattr(torch, case.dtype)
        return torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True)

    query = draw(case.heads, rows)
    keys, values = (draw(case.kv_heads, length + rows) for _ in range(2))
    blocks = flex.create_block_mask(mask, None, None, rows, length + rows, "cuda")
    compiled = torch.compile(flex.flex_attention)

    def forward() -> Any:
        return compiled(query, keys, values, block_mask=blocks, enable_gqa=True)

    def both() -> None:
        for array in (query, keys, values):
            array.grad = None
        out = forward()
        out.backward(out.detach())

    def timed(function: Callable[[], Any]) -> bench_timing.Timing:
        for _ in range(3):
            function()
        return bench_timing.of(bench_peers.torch_seconds(function, repetitions))

    timing = timed(both)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    both()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    with torch.no_grad():
        only = timed(forward)
    return timing.microseconds() | {
        "forward_us": round(only.median * 1e6, 2),
        "temporary_mb": round(peak / 1e6, 1),
    }


PEERS: dict[str, Callable[[cases.AnchorCase, int], dict[str, Any]]] = {
    "torch_flex": _torch_flex
}
