"""What the public functions refuse, and how they choose."""

import re

import jax.numpy as jnp
import pytest
from kernel_marks import needs_mosaic_gpu

from pallas_kernels import _dispatch
from pallas_kernels.cached_attention import (
    block_attention,
    mosaic_gpu,
    mosaic_tpu,
    triton,
    tuning,
    verify_attention,
)

bf16 = jnp.bfloat16


def block(query=(2, 3, 4, 64), keys=(2, 2, 64, 64), values=None, **more):
    more = {"num_keys": jnp.full((2,), 5, jnp.int32)} | more
    return block_attention(
        jnp.zeros(query, more.pop("dtype", bf16)),
        jnp.zeros(keys, bf16),
        jnp.zeros(values or keys, bf16),
        **more,
    )


def windows(query=(2, 3, 4, 64), **more):
    more = {"num_keys": jnp.zeros(query[:2], jnp.int32)} | more
    cache = jnp.zeros((2, 2, 64, 64), bf16)
    return verify_attention(jnp.zeros(query, bf16), cache, cache, **more)


def verify(**more):
    numbers = jnp.zeros((3,), jnp.int32)
    more = {"slots": numbers, "num_keys": numbers, "max_rows": 2} | more
    cache = jnp.zeros((2, 2, 64, 64), bf16)
    return verify_attention(jnp.zeros((3, 4, 64), bf16), cache, cache, **more)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: block(query=(2, 4, 64)),
            "`query` must have 4 axes, got shape (2, 4, 64)",
        ),
        (
            lambda: block(keys=(2, 64, 64)),
            "`keys` must have 4 axes, got shape (2, 64, 64)",
        ),
        (
            lambda: block(values=(2, 2, 32, 64)),
            "`values` must be like `keys`, bfloat16 (2, 2, 64, 64), got bfloat16",
        ),
        (
            lambda: block(keys=(2, 2, 64, 32)),
            "`keys` must have the query's head width, 64, got 32",
        ),
        (
            lambda: block(keys=(2, 3, 64, 64)),
            "query heads must be a multiple of kv heads, got 4 and 3",
        ),
        (
            lambda: block(num_keys=jnp.zeros((3,), jnp.int32)),
            "`num_keys` must be int32 of shape (2,), got int32 (3,)",
        ),
        (
            lambda: block(slots=jnp.zeros((2,), jnp.float32)),
            "`slots` must be int32 of shape (2,), got float32 (2,)",
        ),
        (
            lambda: block(keys=(5, 2, 64, 64)),
            "without `slots` the cache must have a row a request, B = 2, got 5",
        ),
        (
            lambda: block(page_table=jnp.zeros((2,), jnp.int32)),
            "`page_table` must have 2 axes, got shape (2,)",
        ),
        (lambda: block(window=0), "`window` must be at least 1, got 0"),
        (
            lambda: block(implementation="cuda"),
            "`implementation` must be one of 'xla', 'mosaic_gpu', 'triton', "
            "'mosaic_tpu', got 'cuda'",
        ),
        (lambda: verify(max_rows=0), "`max_rows` must be at least 1, got 0"),
        (lambda: verify(max_rows=None), "`max_rows` must be at least 1, got None"),
        (
            lambda: windows(query=(2, 3, 64)),
            "`query` must have 4 axes, got shape (2, 3, 64)",
        ),
        (
            lambda: windows(query=(3, 3, 4, 64)),
            "windows must be as many as rows of the cache, or of the table, 2, got 3",
        ),
        (
            lambda: windows(num_keys=jnp.zeros((2,), jnp.int32)),
            "`num_keys` must be int32 of shape (2, 3), got int32 (2,)",
        ),
        (
            lambda: verify(slots=jnp.zeros((2,), jnp.int32)),
            "`slots` must be int32 of shape (3,), got int32 (2,)",
        ),
        (
            lambda: tuning.MosaicGpuConfig(key_tile=32),
            "`key_tile` must be a positive multiple of 64, got 32",
        ),
        (
            lambda: tuning.MosaicGpuConfig(stages=0),
            "`stages` must be at least 1, got 0",
        ),
        (
            lambda: tuning.MosaicGpuConfig(warpgroups=3),
            "`warpgroups` must be 1 or 2, got 3",
        ),
        (
            lambda: tuning.MosaicTpuConfig(key_tile=100),
            "`key_tile` must be a positive multiple of 128, got 100",
        ),
        (
            lambda: tuning.MosaicTpuConfig(max_rows=0),
            "`max_rows` must be at least 1, got 0",
        ),
    ],
)
def test_refuses(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


def reason(module, query=(6, 4, 64), keys=(2, 2, 64, 64), dtype=bf16, **more):
    more = {"paged": False} | more
    return module.supports(jnp.zeros(query, dtype), jnp.zeros(keys, bf16), **more)


@needs_mosaic_gpu
@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({}, None),
        ({"dtype": jnp.float32}, "of one dtype, got float32 and bfloat16"),
        ({"query": (6, 4, 96)}, "head width must be 64, 128 or 256, got 96"),
        (
            {"query": (6, 260, 64)},
            "at most 64 query heads a kv head fit a tile, got 130",
        ),
        (
            {"keys": (9, 2, 12, 64), "paged": True},
            "the page size must be a multiple of 8, got 12",
        ),
        (
            {"keys": (9, 2, 101, 64)},
            "the capacity of the cache must be a multiple of 8, got 101",
        ),
        (
            {"keys": (9, 2, 24, 64), "paged": True},
            "pages of 24 keys and tiles of 64 must divide one another",
        ),
        (
            {"config": tuning.MosaicGpuConfig(stages=3, warpgroups=2)},
            "two warpgroups need head widths up to 128 and an even number of stages, "
            "got 64 and 3",
        ),
        (
            {"config": tuning.MosaicGpuConfig(stages=14)},
            "bytes of shared memory, the limit is 232448",
        ),
    ],
)
def test_mosaic_gpu_says_why(found, message):
    why = reason(mosaic_gpu, **found)
    assert why is None if message is None else message in why


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({}, None),
        ({"dtype": jnp.float16}, "of one dtype, got float16 and bfloat16"),
        ({"query": (6, 4, 96)}, "head width must be 64, 128 or 256, got 96"),
        (
            {"keys": (9, 2, 24, 64), "paged": True},
            "the page size must be a multiple of 16, got 24",
        ),
    ],
)
def test_mosaic_tpu_says_why(found, message):
    why = reason(mosaic_tpu, **found)
    assert why is None if message is None else message in why


def test_triton_says_why(monkeypatch):
    monkeypatch.setattr(triton.importlib.util, "find_spec", lambda name: None)
    assert "the package jax_triton is not installed" in reason(triton)
    monkeypatch.setattr(triton.importlib.util, "find_spec", lambda name: name)
    assert reason(triton) is None
    assert "got float32 and bfloat16" in reason(triton, dtype=jnp.float32)
    assert "head width must be 64" in reason(triton, query=(6, 4, 96))


def test_a_named_implementation_runs_or_says_why():
    with pytest.raises(
        NotImplementedError,
        match="implementation 'mosaic_tpu' can't run this: keys and queries must be",
    ):
        block(dtype=jnp.float16, implementation="mosaic_tpu")


def test_choice_goes_down_the_platform_s_list(monkeypatch):
    refusals = {"xla": lambda: None, "fast": lambda: "too small", "other": lambda: None}
    preferred = {"gpu": ("fast", "other"), "cpu": ()}
    monkeypatch.setattr(_dispatch, "platform", lambda: "gpu")
    assert _dispatch.choose(None, refusals, preferred) == "other"
    monkeypatch.setattr(_dispatch, "platform", lambda: "cpu")
    assert _dispatch.choose(None, refusals, preferred) == "xla"
    assert _dispatch.choose("other", refusals, preferred) == "other"
    assert _dispatch.compute_capability() == (0, 0)
    assert _dispatch.multiprocessors(default=7) == 7


@needs_mosaic_gpu
@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("units", [1, 8, 64, 512, 4096])
def test_every_setting_of_the_table_fits(units, width):
    for capacity in (64, 1024, 8192):
        config = tuning.mosaic_gpu(units, capacity, width)
        query, keys = jnp.zeros((1, 2, width), bf16), jnp.zeros((1, 2, 64, width), bf16)
        assert mosaic_gpu.supports(query, keys, paged=False, config=config) is None


@pytest.mark.parametrize(
    ("units", "width", "warpgroups", "stages"),
    [(8, 128, 1, 2), (64, 128, 1, 2), (65, 128, 2, 4), (8, 64, 2, 6), (8, 256, 1, 1)],
)
def test_few_units_of_width_128_take_a_small_block(units, width, warpgroups, stages):
    config = tuning.mosaic_gpu(units, 8192, width)
    assert (config.warpgroups, config.stages) == (warpgroups, stages)
