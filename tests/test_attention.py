"""Caches attended by a kernel: what XLA gives, batched, differentiated, or a reason.

The TPU kernel's interpreter is the quickest on a CPU; all kernels share the wiring.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_marks import needs_mosaic_gpu

from dspark_jax import attention, kv_cache, paged_cache
from pallas_kernels import _compat
from pallas_kernels.cached_attention import mosaic_gpu, mosaic_tpu

B, W, G, H, E, PAGE, CAPACITY, NUM_PAGES = 2, 3, 1, 2, 64, 16, 64, 12
bf16 = jnp.bfloat16


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    attend = mosaic_tpu.attend
    monkeypatch.setattr(mosaic_tpu, "attend", functools.partial(attend, interpret=True))


def rows(rng, *shape):
    return tuple(
        jnp.asarray(rng.normal(size=(*shape, heads, E)), bf16) for heads in (H, G, G)
    )


def dense_cache(rng, implementation):
    empty = kv_cache.DenseCache.create(1, B, CAPACITY, G, E, bf16, implementation)
    keys, values = rng.normal(size=(2, B, G, CAPACITY, E))
    return empty.replace(
        keys=(jnp.asarray(keys, bf16),), values=(jnp.asarray(values, bf16),)
    )


def paged_view(rng, implementation, known=20):
    """Pages of two requests, NaN wherever nobody wrote."""
    like = kv_cache.DenseCache.create(1, B, 8, G, E, bf16, implementation)
    pool = paged_cache.PagePool.create(like, NUM_PAGES, PAGE)
    pool = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), pool)
    table = jnp.asarray([[7, 2, -1, -1], [4, 9, -1, -1]], jnp.int32)
    view = pool.view(table)
    at = jnp.broadcast_to(jnp.arange(known, dtype=jnp.int32), (B, known))
    _, key, value = rows(rng, B, known)
    return view.write(0, key, value, at).replace(
        num_keys=jnp.full((B,), known, jnp.int32)
    )


def both(make, call, kernel="mosaic_tpu"):
    """Outputs of the kernel and of XLA for equal caches."""
    found = []
    for implementation in (kernel, "xla"):
        rng = np.random.default_rng(0)
        found.append(np.asarray(call(make(rng, implementation), rng), np.float32))
    return found


def close(got, want):
    np.testing.assert_allclose(got, want, atol=0.03)


def test_windows_over_a_dense_cache():
    positions = jnp.asarray([[40, 41, 42], [3, 4, -1]], jnp.int32)

    def call(cache, rng):
        out, after = cache.attend(0, *rows(rng, B, W), positions)
        assert after.implementation == cache.implementation
        return out

    got, want = both(dense_cache, call)
    assert np.all(got[1, 2] == 0)  # padding
    close(got[0], want[0])
    close(got[1, :2], want[1, :2])


def test_a_draft_block_over_a_dense_cache():
    positions = jnp.asarray([[40, 41, 42], [61, 62, 63]], jnp.int32)

    def call(cache, rng):
        return cache.attend_block(0, *rows(rng, B, W), positions)[0]

    close(*both(dense_cache, call))


@needs_mosaic_gpu
@pytest.mark.slow
def test_windows_and_blocks_by_the_gpu_kernel(monkeypatch):
    attend = functools.partial(mosaic_gpu.attend, interpret=_compat.gpu_interpreter())
    monkeypatch.setattr(mosaic_gpu, "attend", attend)
    positions = jnp.asarray([[20, 21, 22]] * B, jnp.int32)
    for make in (dense_cache, paged_view):
        for method in ("attend", "attend_block"):

            def call(cache, rng, method=method):
                return getattr(cache, method)(0, *rows(rng, B, W), positions)[0]

            close(*both(make, call, kernel="mosaic_gpu"))


def test_windows_and_packed_rows_over_pages():
    positions = jnp.asarray([[20, 21, 22], [20, -1, -1]], jnp.int32)

    def windows(view, rng):
        return view.attend(0, *rows(rng, B, W), positions)[0]

    got, want = both(paged_view, windows)
    close(got[0], want[0])
    close(got[1, :1], want[1, :1])
    layout = paged_cache.make_layout(jnp.asarray([3, 1], jnp.int32), 6, W)

    def packed(view, rng):
        packed_rows = (layout.pack(x, 0)[None] for x in rows(rng, B, W))
        at = layout.pack(positions, -1)[None]
        out, _ = view.replace(layout=layout).attend(0, *packed_rows, at)
        return out[0]

    got, want = both(paged_view, packed)
    close(got[:4], want[:4])
    assert np.all(got[4:] == 0)


def test_a_draft_block_over_pages():
    """Positions from 32 on have no page: those rows see, and are not seen."""
    for first, compared in ((20, B), (30, 0)):
        positions = jnp.asarray([[first, first + 1, first + 2]] * B, jnp.int32)

        def call(view, rng, positions=positions):
            return view.attend_block(0, *rows(rng, B, W), positions)[0]

        got, want = both(functools.partial(paged_view, known=first), call)
        close(got[:compared], want[:compared])
        assert np.all(np.isfinite(got))


def test_a_draft_block_over_pages_keeps_its_types_under_x64(rng):
    view = paged_view(rng, "mosaic_tpu")
    block = rows(rng, B, W)
    positions = jnp.asarray([[20, 21, 22]] * B, jnp.int32)
    with jax.enable_x64(True):
        out, _ = jax.eval_shape(
            lambda view, *block: view.attend_block(0, *block, positions), view, *block
        )
    assert (out.shape, out.dtype) == (block[0].shape, bf16)


def test_vmap_makes_one_call_of_more_requests(rng):
    """Over caches, over pools, and over tables of one pool."""
    positions = jnp.asarray([[20, 21, 22], [20, 21, -1]], jnp.int32)
    fed = [rows(rng, B, W) for _ in range(2)]
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *fed)

    def attended(cache, rows):
        return cache.attend(0, *rows, positions)[0]

    for make in (dense_cache, paged_view):
        caches = [make(np.random.default_rng(seed), "mosaic_tpu") for seed in (1, 2)]
        stack = jax.tree.map(lambda *xs: jnp.stack(xs), *caches)
        got = jax.jit(jax.vmap(attended))(stack, stacked)
        want = [attended(*pair) for pair in zip(caches, fed, strict=True)]
        np.testing.assert_array_equal(got, jnp.stack(want))
        text = str(jax.make_jaxpr(jax.vmap(attended))(stack, stacked))
        assert text.count("pallas_call") == 1
    layout = paged_cache.make_layout(jnp.asarray([3, 1], jnp.int32), 5, W)
    view = paged_view(rng, "mosaic_tpu").replace(layout=layout)
    query = jnp.stack([layout.pack(x[0], 0) for x in fed])
    at = layout.pack(positions, -1)

    def over_table(table, query):
        return attention.attend(
            query,
            *(x[0] for x in (view.pool.keys, view.pool.values)),
            attention.Place(at, table, layout),
            implementation="mosaic_tpu",
            plain=None,
        )

    tables = jnp.stack([view.table, view.table[::-1]])
    # Nothing is written at 20 to 22: look below.
    at = jnp.where(at >= 0, at - 4, -1)
    got = jax.jit(jax.vmap(over_table))(tables, query)
    want = [over_table(*pair) for pair in zip(tables, query, strict=True)]
    np.testing.assert_array_equal(got, jnp.stack(want))
    assert np.all(np.isfinite(got))


def test_gradients_are_those_of_xla(rng):
    positions = jnp.asarray([[40, 41, 42], [3, 4, 5]], jnp.int32)
    query, key, value = rows(rng, B, W)

    def loss(query, cache):
        out, _ = cache.attend(0, query, key, value, positions)
        return jnp.sum(out.astype(jnp.float32) ** 2)

    got, want = (
        jax.grad(loss)(query, dense_cache(np.random.default_rng(1), name))
        for name in ("mosaic_tpu", "xla")
    )
    np.testing.assert_allclose(
        np.asarray(got, np.float32), np.asarray(want, np.float32), atol=0.05
    )


def test_a_named_kernel_says_why_it_cannot(rng):
    like = kv_cache.DenseCache.create(1, B, 64, G, E, jnp.float32, "mosaic_gpu")
    fed = (x.astype(jnp.float32) for x in rows(rng, B, W))
    with pytest.raises(NotImplementedError, match="'mosaic_gpu' can't run this: "):
        like.attend(0, *fed, jnp.zeros((B, W), jnp.int32))
