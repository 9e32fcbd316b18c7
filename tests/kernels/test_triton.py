"""The Triton kernel is compiled for Hopper without a device, where triton is."""

import itertools

import pytest

from pallas_kernels.cached_attention import tuning

triton = pytest.importorskip("triton", reason="an extra")


SHARED_BYTES = 227 * 1024  # of a block on an H200


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    """jax-triton, where another test has imported it, leaves triton without one."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize(
    ("dtype", "width", "paged", "window", "parts"),
    [("bf16", 128, False, 0, 1), ("bf16", 64, True, 100, 4), ("fp32", 64, True, 0, 2)],
)
def test_compiles_for_hopper(dtype, width, paged, window, parts):
    compiled = compile_for_hopper(dtype, width, paged, window, parts)
    assert "kernel" in compiled.asm["ptx"]


@pytest.mark.parametrize(
    ("dtype", "width", "units"),
    list(itertools.product(("bf16", "fp32"), (64, 128, 256), (8, 512))),
)
def test_settings_fit_shared_memory(dtype, width, units):
    """With most rows: three stages of float32 and width 256 did not."""
    itemsize = {"bf16": 2, "fp32": 4}[dtype]
    config = tuning.triton(units, 8192, width=width, itemsize=itemsize)
    compiled = compile_for_hopper(
        dtype, width, False, 0, config.num_parts, rows=64, num_stages=config.num_stages
    )
    assert compiled.metadata.shared <= SHARED_BYTES


def compile_for_hopper(dtype, width, paged, window, parts, *, rows=32, num_stages=3):
    from triton.backends import compiler as backends

    from pallas_kernels.cached_attention import triton_kernel

    constants = {
        "total": 56,
        "count": 8,
        "kv_heads": 8,
        "group": 4,
        "width": width,
        "rows": rows,
        "key_tile": 64,
        "key_rows": 16 if paged else 8192,
        "pages": 128,
        "parts": parts,
        "paged": paged,
        "window": window,
        "to_log2": 0.125,
        "precise": dtype == "fp32",
    }
    pointer = f"*{dtype}"
    signature = dict.fromkeys(("query", "keys", "values"), pointer)
    signature |= dict.fromkeys(("table", "spans", "limits"), "*i32")
    signature |= {"outs": pointer if parts == 1 else "*fp32", "sums": "*fp32"}
    signature |= dict.fromkeys(constants, "constexpr")
    source = triton.compiler.ASTSource(
        fn=triton_kernel.kernel, signature=signature, constexprs=constants
    )
    return triton.compile(
        source,
        target=backends.GPUTarget("cuda", 90, 32),
        options={"num_warps": 4, "num_stages": num_stages},
    )
