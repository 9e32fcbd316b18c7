"""A paged cache holds what a dense one holds, in any order of pages and rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import kv_cache, paged_cache

B, W, G, H, E, PAGE, CAPACITY = 3, 4, 2, 4, 6, 4, 16
NUM_PAGES = 14


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def arrays(rng, *shape):
    return tuple(
        jnp.asarray(rng.normal(size=(*shape, heads, E)), jnp.float32)
        for heads in (H, G, G)
    )


def empty(rng, num_pages=NUM_PAGES):
    dense = kv_cache.DenseCache.create(1, B, CAPACITY, G, E, jnp.float32)
    pool = paged_cache.PagePool.create(dense, num_pages, PAGE)
    pages = rng.permutation(num_pages)[: B * CAPACITY // PAGE]
    return dense, pool.view(jnp.asarray(pages.reshape(B, -1), jnp.int32))


def test_rows_of_requests_equal_a_dense_cache(rng):
    dense, paged = empty(rng)
    assert paged.capacity == dense.capacity == CAPACITY
    for start in (0, 3, 7, 5, 12):  # 5: a rollback
        positions = start + np.arange(W)[None] + np.array([[0], [-3], [-1]])
        positions[1, 2:] = -1
        positions = jnp.asarray(np.maximum(positions, -1), jnp.int32)
        rows = arrays(rng, B, W)
        want, dense = dense.attend(0, *rows, positions)
        got, paged = paged.attend(0, *rows, positions)
        is_real = np.asarray(positions) >= 0
        np.testing.assert_allclose(got[is_real], want[is_real], atol=1e-6)
        np.testing.assert_array_equal(paged.context(0)[0], dense.context(0)[0])


def test_packed_rows_equal_windows_of_their_own(rng):
    dense, paged = empty(rng)
    at = jnp.broadcast_to(jnp.arange(6, dtype=jnp.int32), (B, 6))
    rows = arrays(rng, B, 6)
    _, dense = dense.attend(0, *rows, at)
    _, paged = paged.attend(0, *rows, at)
    counts = jnp.asarray([3, 0, 1], jnp.int32)
    layout = paged_cache.make_layout(counts, 7, W)
    np.testing.assert_array_equal(layout.request, [0, 0, 0, 2, 3, 3, 3])
    np.testing.assert_array_equal(layout.offset[:4], [0, 1, 2, 0])
    np.testing.assert_array_equal(
        layout.rows, [[0, 1, 2, 7], [7, 7, 7, 7], [3, 7, 7, 7]]
    )
    rows = arrays(rng, B, W)
    offset = np.arange(W)[None]
    positions = np.where(offset < np.asarray(counts)[:, None], 6 + offset, -1)
    positions = jnp.asarray(positions, jnp.int32)
    want, dense = dense.attend(0, *rows, positions)
    packed = paged.replace(layout=layout)
    got, packed = packed.attend(
        0,
        *(layout.pack(x, 0)[None] for x in rows),
        layout.pack(positions, -1)[None],
    )
    assert got.shape == (1, 7, H, E)
    is_real = np.asarray(positions) >= 0
    back = np.asarray(layout.unpack(got[0], 0))
    np.testing.assert_allclose(back[is_real], want[is_real], atol=1e-6)
    np.testing.assert_array_equal(packed.context(0)[0], dense.context(0)[0])


def test_pieces_of_one_request_in_one_call_see_each_other(rng):
    dense, paged = empty(rng)
    rows = arrays(rng, 1, 2 * W)
    at = jnp.arange(2 * W, dtype=jnp.int32)[None]
    one = jax.tree.map(lambda x: x[:1], dense)
    want, _ = one.attend(0, *rows, at)
    table = jnp.broadcast_to(paged.table[:1], (2, CAPACITY // PAGE))
    pieces = (x.reshape(2, W, *x.shape[2:]) for x in rows)
    got, _ = paged.pool.view(table).attend(0, *pieces, at.reshape(2, W))
    np.testing.assert_allclose(got.reshape(want.shape), want, atol=1e-6)


def test_a_strangers_nan_stays_in_his_pages(rng):
    _, paged = empty(rng)
    nan = paged.pool.replace(
        keys=(jnp.full_like(paged.pool.keys[0], jnp.nan),),
        values=(jnp.full_like(paged.pool.values[0], jnp.nan),),
    )
    # Entries beyond the end: no page, or somebody's.
    table = paged.table.at[0, 2:].set(-1)
    view = nan.view(table)
    rows = arrays(rng, B, W)
    at = jnp.broadcast_to(jnp.arange(W, dtype=jnp.int32), (B, W))
    got, view = view.attend(0, *rows, at)
    assert np.all(np.isfinite(got))
    _, values = view.replace(num_keys=jnp.full((B,), W, jnp.int32)).context(0)
    assert np.all(np.isfinite(values))
    assert np.all(np.asarray(values)[:, :, W:] == 0)


def test_rows_without_a_page_are_dropped(rng):
    _, paged = empty(rng)
    before = jax.tree.map(np.asarray, paged.pool)
    view = paged.pool.view(jnp.full((B, 2), -1, jnp.int32))
    rows = arrays(rng, B, W)
    positions = np.full((B, W), -1)
    positions[0] = [0, 1, 8, 9]  # no page, and beyond the table
    positions[1] = NUM_PAGES * PAGE
    _, view = view.attend(0, *rows, jnp.asarray(positions, jnp.int32))
    jax.tree.map(np.testing.assert_array_equal, view.pool, before)


def test_a_layer_gathers_no_more_than_the_tables_say(rng):
    """The largest array of a step over a large pool is the gathered context."""
    _, paged = empty(rng, num_pages=4096)
    rows = arrays(rng, B, W)
    at = jnp.broadcast_to(jnp.arange(W, dtype=jnp.int32), (B, W))

    @functools.partial(jax.jit, donate_argnums=0)
    def step(pool, table):
        out, view = pool.view(table).attend(0, *rows, at)
        return out, view.pool

    compiled = step.lower(paged.pool, paged.table).compile()
    memory = compiled.memory_analysis()
    context = B * CAPACITY * G * E * 4
    assert memory.temp_size_in_bytes < 8 * context + 20_000
    assert memory.alias_size_in_bytes == 2 * paged.pool.keys[0].nbytes
