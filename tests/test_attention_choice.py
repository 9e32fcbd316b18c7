"""Which kernel attends a cache: what "auto" takes, and what programs then hold."""

import functools
import types

import jax
import jax.numpy as jnp
import pytest
from kernel_marks import needs_mosaic_gpu

import dspark_jax
from dspark_jax import attention, kv_cache
from dspark_jax.config import BlockConfig, DecoderConfig, DrafterConfig
from dspark_jax.drafters import dspark
from dspark_jax.serving import programs, slot_state
from dspark_jax.serving.step_spec import Params, StepSpec
from dspark_jax.targets import decoder
from pallas_kernels import _compat, _dispatch
from pallas_kernels.cached_attention import tuning

B, G, H, E, PAGE = 2, 1, 2, 64, 16
bf16 = jnp.bfloat16


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
