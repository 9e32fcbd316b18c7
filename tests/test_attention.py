"""Caches attended by a kernel: what XLA gives, batched, differentiated, chosen.

The TPU kernel's interpreter is the quickest on a CPU; all kernels share the wiring.
"""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dspark_jax
from dspark_jax import attention, kv_cache, paged_cache
from dspark_jax.config import BlockConfig, DecoderConfig, DrafterConfig
from dspark_jax.drafters import dspark
from dspark_jax.serving import programs, slot_state
from dspark_jax.serving.step_spec import Params, StepSpec
from dspark_jax.targets import decoder
from pallas_kernels import _compat, _dispatch
from pallas_kernels.cached_attention import mosaic_gpu, mosaic_tpu, tuning

B, W, G, H, E, PAGE, CAPACITY, NUM_PAGES = 2, 3, 1, 2, 64, 16, 64, 12
bf16 = jnp.bfloat16
needs_mosaic_gpu = pytest.mark.skipif(
    _compat.mosaic_gpu_missing() is not None, reason=str(_compat.mosaic_gpu_missing())
)


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


def on_a_hopper_gpu(monkeypatch, *, from_bytes=0):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(_dispatch, "compute_capability", lambda: (9, 0))
    monkeypatch.setattr(_compat, "is_unpartitioned", lambda: True)
    monkeypatch.setattr(tuning, "FASTER_FROM_BYTES", from_bytes)


def chosen(implementation="auto", *, dtype=bf16, capacity=64, width=64, rows=8):
    query = jax.ShapeDtypeStruct((4, rows, H, width), dtype)
    keys = jax.ShapeDtypeStruct((4, G, capacity, width), dtype)
    return attention.choose(implementation, query, keys, rows=rows, table=None)


@needs_mosaic_gpu
def test_auto_takes_a_kernel_where_it_was_faster(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    assert chosen() == "xla"
    size = 2 * 4 * G * 64 * 64 * 2  # bytes of keys and values
    on_a_hopper_gpu(monkeypatch, from_bytes=size)
    assert chosen() == "mosaic_gpu"
    assert chosen("xla") == "xla"
    assert chosen("triton") == "triton"
    assert chosen(capacity=56) == "xla"  # too little to read
    assert chosen(capacity=68) == "xla"  # not a multiple of 8
    assert chosen(width=96) == "xla"
    assert chosen(rows=33) == "xla"  # two heads each: more than 64 rows
    assert chosen(dtype=jnp.float32) == "xla"
    monkeypatch.setattr(_dispatch, "compute_capability", lambda: (8, 0))
    assert chosen() == "xla"


@needs_mosaic_gpu
def test_auto_needs_one_device_or_shard_map(monkeypatch):
    is_unpartitioned = _compat.is_unpartitioned
    on_a_hopper_gpu(monkeypatch)
    monkeypatch.setattr(_compat, "is_unpartitioned", is_unpartitioned)
    monkeypatch.setattr(jax, "device_count", lambda: 8)  # also beside one GPU
    found = {}

    def look(name, x):
        found[name] = chosen()
        return x

    jax.eval_shape(functools.partial(look, "jit"), jnp.zeros(8))
    mesh = jax.make_mesh(
        (len(jax.devices()),), ("data",), axis_types=(jax.sharding.AxisType.Auto,)
    )
    spec = jax.sharding.PartitionSpec("data")
    mapped = jax.shard_map(
        functools.partial(look, "shard_map"), mesh=mesh, in_specs=spec, out_specs=spec
    )
    jax.eval_shape(mapped, jnp.zeros(8))
    assert found == {"jit": "xla", "shard_map": "mosaic_gpu"}


def test_a_named_kernel_says_why_it_cannot(rng):
    like = kv_cache.DenseCache.create(1, B, 64, G, E, jnp.float32, "mosaic_gpu")
    fed = (x.astype(jnp.float32) for x in rows(rng, B, W))
    with pytest.raises(NotImplementedError, match="'mosaic_gpu' can't run this: "):
        like.attend(0, *fed, jnp.zeros((B, W), jnp.int32))


def test_kernels_store_a_multiple_of_8_and_a_block(monkeypatch):
    def stored(implementation, spare=0):
        create = kv_cache.DenseCache.create
        return create(1, 1, 25, G, E, bf16, implementation, spare=spare).capacity

    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    assert stored("auto", spare=8) == stored("xla", spare=8) == 25
    assert stored("mosaic_gpu") == 32
    assert stored("mosaic_gpu", spare=8) == 40
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert stored("auto") == 32
    assert stored("auto", spare=8) == 40
    assert stored("xla", spare=8) == 25


def make_models(implementation, max_position=256):
    block = BlockConfig(
        width=32, num_heads=H, num_kv_heads=G, head_width=E, ffn_width=32
    )
    common = {
        "vocab_size": 32,
        "block": block,
        "max_position": max_position,
        "param_dtype": "bfloat16",
        "compute_dtype": "bfloat16",
    }
    target = decoder.make_target(
        DecoderConfig(num_layers=2, attention=implementation, **common)
    )
    drafter = dspark.make_drafter(
        DrafterConfig(
            num_layers=1,
            block_size=2,
            mask_token=1,
            tap_layers=(0,),
            num_target_layers=2,
            markov_rank=4,
            **common,
        ),
        target,
    )
    return target, drafter


def generate_program(target, drafter):
    def generate(key, tokens, lengths, target_params, drafter_params):
        return dspark_jax.speculative_generate(
            key,
            tokens,
            lengths,
            target=target,
            target_params=target_params,
            drafter=drafter,
            drafter_params=drafter_params,
            max_new_tokens=59,
        ).tokens

    params = decoder.abstract(target.config), dspark.abstract(drafter.config)
    tokens = jnp.ones((B, 5), jnp.int32)
    lengths = jnp.full((B,), 5, jnp.int32)
    return jax.jit(generate).trace(jax.random.key(0), tokens, lengths, *params)


def step_program(target, drafter):
    spec = StepSpec(
        target=target,
        drafter=drafter,
        options=dspark_jax.Speculation(),
        draft_length=2,
        sampling_fields=(),
        max_stop_tokens=1,
        num_rounds=1,
        caps_commit=False,
        is_budgeted=False,
        chunk=8,
        pages_per_slot=4,
    )
    params = Params(
        target=decoder.abstract(target.config),
        drafter=dspark.abstract(drafter.config),
        temperatures=None,
    )
    slots = jax.eval_shape(lambda: slot_state.make_state(spec, B, 64, 8, PAGE))
    control = jax.ShapeDtypeStruct((B, spec.round_control.width), jnp.int32)
    return programs.speculative_rounds.trace(
        params, slots, control, spec=spec, num_rows=5
    )


@needs_mosaic_gpu
@pytest.mark.parametrize("make", [generate_program, step_program])
def test_whole_programs_lower_with_the_kernel(make, monkeypatch):
    on_a_hopper_gpu(monkeypatch)
    # Models of its own: a program that was traced here must not be found elsewhere.
    traced = make(*make_models("auto", max_position=255))
    # Target and drafter, in a generation also its prefill, each lowered once for all
    # layers. The generation's draft cache holds 72 positions, which are two parts: one
    # kernel more combines them. A program for another platform has XLA's form.
    kernels = traced.lower(lowering_platforms=("cuda",)).as_text().count("@mosaic_gpu")
    assert kernels == (4 if make is generate_program else 2)
    assert "@mosaic_gpu" not in traced.lower(lowering_platforms=("cpu",)).as_text()


def test_a_field_called_attention_of_another_target_is_not_ours():
    target, _ = make_models("xla")
    theirs = target._replace(config=types.SimpleNamespace(attention="gqa"))
    assert dspark._implementation(target) == "xla"
    assert dspark._implementation(theirs) == "auto"


def test_on_a_cpu_auto_is_the_program_of_xla():
    auto, plain = (step_program(*make_models(x)).lower() for x in ("auto", "xla"))
    assert auto.as_text() == plain.as_text()
