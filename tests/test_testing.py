"""`check_target` passes true targets and names the law that a wrong one breaks.

The page docs/bring_your_own_target.md is run as it stands.
"""

import dataclasses
import functools
import re
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dspark_jax
from dspark_jax import kv_cache, testing
from dspark_jax.config import BlockConfig, RopeConfig
from dspark_jax.types import Bound, Target

pytestmark = pytest.mark.usefixtures("quick_compilation")

LLAMA = {
    "num_layers": 2,
    "tied_embeddings": False,
    "block": BlockConfig(
        width=8,
        num_heads=2,
        num_kv_heads=1,
        head_width=4,
        ffn_width=12,
        attention_bias=True,
        output_bias=True,
        mlp_bias=True,
        rope=RopeConfig(kind="llama3", factor=8.0, original_max_position=16),
    ),
}
QWEN3 = {
    "num_layers": 2,
    "tied_embeddings": True,
    "block": BlockConfig(
        width=8, num_heads=4, num_kv_heads=2, head_width=4, ffn_width=12, qk_norm=True
    ),
}


HALF = {"num_layers": 1, "param_dtype": "bfloat16", "compute_dtype": "bfloat16"}


@pytest.mark.parametrize("fields", [LLAMA, QWEN3, HALF], ids=["llama", "qwen3", "half"])
def test_built_in_decoders_pass(fields):
    models = testing.make_tiny_models(target_fields=fields)
    testing.check_target(models.target, models.target_params, batch=2)


def test_the_page_on_bringing_your_own_target(root):
    page = root / "docs" / "bring_your_own_target.md"
    if not page.is_file():
        pytest.skip("the documentation is not beside the tests")
    pytest.importorskip("flax.linen")
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)
    assert len(blocks) == 3
    module = types.ModuleType("bring_your_own_target")
    sys.modules[module.__name__] = module  # dataclasses and pickles look it up
    try:
        for block in blocks:
            exec(compile(block, str(page), "exec"), vars(module))
        assert module.make_target(module.config) == module.target
        plain = jax.jit(
            lambda key, prompts, lengths: dspark_jax.autoregressive_generate(
                key,
                prompts,
                lengths,
                target=module.target,
                target_params=module.target_params,
                max_new_tokens=8,
                num_samples=1,
            )
        )(jax.random.key(1), module.prompts, module.lengths)
    finally:
        del sys.modules[module.__name__]
    np.testing.assert_array_equal(module.generation.tokens, plain.tokens)
    np.testing.assert_array_equal(module.generation.lengths, plain.lengths)
    assert module.generation.stats.num_verified.sum() > 0


# A target of a few operations, right unless `fault` says otherwise.


@dataclasses.dataclass(frozen=True)
class ToyConfig:
    fault: str = ""
    vocab_size: int = 11
    width: int = 4
    num_layers: int = 2
    max_position: int = 16
    stop_tokens: tuple[int, ...] = ()
    fingerprint: str = ""


def init_cache(config, batch, capacity):
    rows = jnp.zeros((config.num_layers, batch, capacity, config.width))
    if config.fault == "two request axes":
        return rows, jnp.zeros((batch, batch), bool)
    return rows, jnp.zeros((batch, capacity), bool)


def forward(config, params, tokens, positions, cache, *, tap_layers=()):
    fault = config.fault
    stored, written = cache
    capacity = stored.shape[2]
    x = embed(config, params, tokens)
    states, first = [x], x
    x = x + params["position"][jnp.clip(positions, 0)]
    at = jnp.where(positions < 0, capacity, positions)
    if fault == "padding wraps":
        at = positions
    if fault == "padding is clipped":
        at = jnp.clip(positions, 0)
    request = jnp.arange(tokens.shape[0])[:, None]
    written = written.at[request, at].set(True, mode="drop")
    index = jnp.arange(capacity)[None, None]
    visible = index <= positions[:, :, None]
    if fault == "sees the next position":
        visible = index <= positions[:, :, None] + 1
    if fault == "stale rows are visible":
        later = positions[:, None, :] > positions[:, :, None]  # [B, W, W]
        fed = index[..., None] == positions[:, None, None, :]  # [B, 1, C, W]
        visible = written[:, None] & ~jnp.any(later[:, :, None] & fed, axis=-1)
    if fault == "sees itself only":
        visible = index == positions[:, :, None]
    if fault == "window by row number":
        rows = jnp.arange(tokens.shape[1])[None, :, None]
        visible = visible & (index >= positions[:, :, None] - rows)
    for layer in range(config.num_layers):
        stored = stored.at[layer, request, at].set(x, mode="drop")
        keys = stored[layer]
        scores = jnp.einsum("bwd,bcd->bwc", x @ params["mix"][layer], keys)
        scores = jnp.where(visible, scores, jnp.finfo(jnp.float32).min)
        x = x + jnp.einsum("bwc,bcd->bwd", jax.nn.softmax(scores), keys)
        if fault == "batch leakage":
            x = x + 0.01 * jnp.mean(x, axis=0, keepdims=True)
        x = jnp.tanh(x @ params["out"][layer])
        states.append(x)
    hidden = x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)
    if fault == "taps are shifted":
        states = [first, *states[:-1]]
    if fault == "the last tap is normed":
        states[-1] = hidden
    if fault == "tap -1 has positions":
        states[0] = states[0] + params["position"][jnp.clip(positions, 0)]
    if fault == "not finite":
        hidden = hidden.at[:, 1].set(jnp.nan)
    if fault == "cache dtype":
        written = written.astype(jnp.int32)
    taps = [states[i + 1] for i in tap_layers]
    if fault == "taps in layer order" and len(tap_layers) == 2:
        taps = taps[::-1]
    if fault == "taps change hidden" and tap_layers == (-1, 1):
        hidden = hidden * 1.01
    return hidden, jnp.concatenate(taps, axis=-1) if taps else None, (stored, written)


def unembed(config, params, hidden):
    logits = hidden @ params["embed"].T
    if config.fault == "logits are bfloat16":
        return logits[..., : config.vocab_size].astype(jnp.bfloat16)
    return logits if config.fault == "padded vocabulary" else logits[..., :11]


def embed(config, params, ids):
    return params["embed"][ids]


def make_toy(fault="", **changes):
    config = ToyConfig(fault)
    functions = {
        "init_cache": init_cache,
        "forward": forward,
        "unembed": unembed,
        "embed": embed,
    }
    bound = {name: Bound(f, (config,)) for name, f in functions.items()}
    return Target(**{"config": config, **bound, **changes})


@pytest.fixture(scope="module")
def toy_params():
    rng = np.random.default_rng(0)
    shapes = {"embed": (16, 4), "position": (16, 4), "mix": (2, 4, 4), "out": (2, 4, 4)}
    return {
        name: jnp.asarray(rng.normal(size=shape), jnp.float32)
        for name, shape in shapes.items()
    }


def test_the_toy_passes(toy_params):
    testing.check_target(make_toy(), toy_params)


FAULTS = {
    "sees the next position": "a row sees positions up to its own only",
    "window by row number": "W rows equal W single rows",
    "stale rows are visible": "feeding again from an earlier position equals a fresh "
    "cache (rollback)",
    "sees itself only": "a row sees all earlier positions: another token at position 0",
    "padding wraps": "a row at position -1 writes nothing and influences nothing",
    "padding is clipped": "a row at position -1 writes nothing and influences nothing",
    "batch leakage": "other requests are invisible",
    "taps are shifted": "tap i is the raw output of layer i: taps -1 and 0 are the sa",
    "the last tap is normed": "tap i is the raw output of layer i: tap 1 equals `hidd",
    "tap -1 has positions": "tap -1 equals embed(tokens)",
    "taps in layer order": "taps are concatenated in the order of tap_layers",
    "taps change hidden": "tap_layers do not change hidden",
    "padded vocabulary": "logits has shape (3, 4, 11): got (3, 4, 16)",
    "logits are bfloat16": "logits are float32: got bfloat16",
    "not finite": "hidden are finite: at (request, row, channel) = (0, 1, 0) got nan",
    "cache dtype": "forward returns a cache of the shapes it got",
    "two request axes": "a cache has one axis of requests",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_law_is_named(fault, toy_params):
    with pytest.raises(
        testing.TargetLawError, match=re.escape(FAULTS[fault])
    ) as caught:
        testing.check_target(make_toy(fault), toy_params)
    assert isinstance(caught.value, AssertionError)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"embed": lambda params, ids: ids}, "embed is <lambda>"),
        (
            {"embed": functools.partial(embed, ToyConfig())},
            "a copy of embed is not equal to it",
        ),
        (
            {"embed": Bound(embed, ([],))},
            "hashable and equal by value: unhashable type: 'list'",
        ),
        ({"config": types.SimpleNamespace(vocab_size=11)}, "no width"),
    ],
)
def test_a_target_that_would_recompile_is_refused(change, message):
    if isinstance(change.get("embed"), types.FunctionType):
        message = "made anew with every Target"
    with pytest.raises(testing.TargetLawError, match=re.escape(message)):
        testing.check_target(make_toy(**change), {})


def test_arguments_are_checked():
    with pytest.raises(
        TypeError, match=re.escape("`target` must be a Target, got int")
    ):
        testing.check_target(3, {})
    with pytest.raises(
        ValueError, match=re.escape("`batch` must be at least 2, got 1")
    ):
        testing.check_target(make_toy(), {}, batch=1)
    with pytest.raises(ValueError, match=re.escape("must be at least 2 * width = 24")):
        testing.check_target(make_toy(), {}, width=12)


def test_samples_repeat_the_axis_of_requests_wherever_it_is():
    stored, written = init_cache(ToyConfig(), 2, 3)
    stored = stored + jnp.arange(2.0)[None, :, None, None]  # [L, B, C, D]
    written = written.at[1].set(True)
    cache = {"layers": (stored, written), "counter": jnp.zeros(())}

    def make(batch):
        return {"layers": init_cache(ToyConfig(), batch, 3), "counter": jnp.zeros(())}

    got = kv_cache.repeat_rows(cache, make, 2, 2)
    assert got["counter"].shape == ()
    assert got["layers"][0].shape == (2, 4, 3, 4)
    np.testing.assert_array_equal(got["layers"][0][0, :, 0, 0], [0, 0, 1, 1])
    np.testing.assert_array_equal(got["layers"][1][:, 0], [False, False, True, True])
