"""What else does the kernels' job: cuDNN through JAX, and torch where it is installed.

A peer that can't do a case's whole job (torch's flash attention takes no lengths) is
given the nearest job it can do, and runs only where that is the same job.
"""

import importlib.util
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import cases


def cudnn(case: cases.CachedCase, inputs: cases.CachedInputs) -> Callable[..., Any]:
    """cuDNN's flash attention, query heads of a kv head folded into rows."""
    if case.kind != "block" or case.page is not None or case.window is not None:
        raise NotImplementedError("folded rows of cuDNN must all see the same keys")
    batch, rows, heads, width = inputs.query.shape
    group = heads // case.kv_heads
    lengths = inputs.arguments["num_keys"]

    def call(query: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
        folded = query.reshape(batch, rows, case.kv_heads, group, width)
        folded = jnp.moveaxis(folded, 3, 2).reshape(batch, -1, case.kv_heads, width)
        out = jax.nn.dot_product_attention(
            folded,
            jnp.swapaxes(keys, 1, 2),
            jnp.swapaxes(values, 1, 2),
            key_value_seq_lengths=lengths,
            query_seq_lengths=jnp.full((batch,), rows * group, jnp.int32),
            implementation="cudnn",
        )
        out = out.reshape(batch, rows, group, case.kv_heads, width)
        return jnp.moveaxis(out, 2, 3).reshape(query.shape)

    return call


def _torch_sdpa(backend: str) -> Callable[[cases.CachedCase, int, int], list[float]]:
    def run(case: cases.CachedCase, count: int, repetitions: int) -> list[float]:
        need_torch()
        if case.kind != "block" or len(set(case.lengths)) > 1:
            raise NotImplementedError("torch's SDPA takes no lengths: equal ones only")
        import torch
        from torch.nn import attention
        from torch.nn.functional import scaled_dot_product_attention

        chosen = {
            "cudnn": attention.SDPBackend.CUDNN_ATTENTION,
            "flash": attention.SDPBackend.FLASH_ATTENTION,
        }[backend]
        query, stored = _torch_inputs(case, count)

        def chain() -> Any:
            out = query
            for keys, values in stored:
                out = scaled_dot_product_attention(out, keys, values)
            return out

        with attention.sdpa_kernel([chosen]), torch.no_grad():
            return _torch_time(chain, count, repetitions)

    return run


def _torch_flex(case: cases.CachedCase, count: int, repetitions: int) -> list[float]:
    need_torch()
    if case.kind != "block":
        raise NotImplementedError("flex_attention is set up for blocks only")
    import torch
    from torch.nn.attention import flex_attention as flex

    query, stored = _torch_inputs(case, count)
    lengths = torch.tensor(case.lengths, device="cuda", dtype=torch.int32)

    def mask(batch: Any, head: Any, row: Any, key: Any) -> Any:
        return key < lengths[batch]

    blocks = flex.create_block_mask(
        mask, len(case.lengths), None, query.shape[2], stored[0][0].shape[2], "cuda"
    )
    compiled = torch.compile(flex.flex_attention)

    def chain() -> Any:
        out = query
        for keys, values in stored:
            out = compiled(out, keys, values, block_mask=blocks)
        return out

    with torch.no_grad():
        return _torch_time(chain, count, repetitions)


def torch_copy_rate() -> float | None:
    """TB/s of torch's device copy, read and written; None without torch or a GPU."""
    if not _has_torch():
        return None
    import torch

    if not torch.cuda.is_available():
        return None
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    target.copy_(source)
    found = []
    for _ in range(5):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(10):
            target.copy_(source)
        torch.cuda.synchronize()
        found.append((time.perf_counter() - started) / 10)
    del source, target
    torch.cuda.empty_cache()
    return 2 * 2**30 / min(found) / 1e12


def _has_torch() -> bool:
    return importlib.util.find_spec("torch") is not None


def need_torch() -> None:
    """Raises where torch or a GPU that it sees is missing."""
    if not _has_torch():
        raise NotImplementedError("torch is not installed")
    import torch

    if not torch.cuda.is_available():
        raise NotImplementedError("torch sees no GPU")


def torch_seconds(function: Callable[[], Any], repetitions: int) -> list[float]:
    """Seconds a call on the device, by CUDA events around ten calls in a row."""
    import torch

    seconds = []
    for _ in range(repetitions):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(10):
            function()
        end.record()
        torch.cuda.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3 / 10)
    return seconds


def _torch_inputs(case: cases.CachedCase, count: int) -> tuple[Any, list[Any]]:
    # Folded: query heads of a kv head are rows.
    import torch

    batch, rows = len(case.lengths), case.rows
    assert isinstance(rows, int)  # a block
    group = case.heads // case.kv_heads
    dtype = getattr(torch, case.dtype)

    def draw(length: int) -> Any:
        shape = (batch, case.kv_heads, length, case.width)
        return torch.randn(shape, device="cuda", dtype=dtype)

    size = max(case.lengths) if len(set(case.lengths)) == 1 else case.size
    return draw(rows * group), [(draw(size), draw(size)) for _ in range(count)]


def _torch_time(chain: Callable[[], Any], count: int, repetitions: int) -> list[float]:
    # Replays of a CUDA graph, so that the host's time is not counted.
    import torch

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            chain()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    graph.replay()
    seconds = [each / count for each in torch_seconds(graph.replay, repetitions)]
    torch.cuda.empty_cache()
    return seconds


TORCH: dict[str, Callable[[cases.CachedCase, int, int], list[float]]] = {
    "torch_cudnn": _torch_sdpa("cudnn"),
    "torch_flash": _torch_sdpa("flash"),
    "torch_flex": _torch_flex,
}
PEERS: dict[str, Any] = {"cudnn": cudnn, **TORCH}
