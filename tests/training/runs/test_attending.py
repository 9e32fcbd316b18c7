"""Who attends in a run is said, or refused before any work."""

import re

import jax
import pytest

from dspark_jax.training.runs import attending, run_config
from pallas_kernels import _dispatch


@pytest.fixture
def wide(root, tiny):
    """A run of bfloat16 drafters with heads of 64."""
    config, target = tiny.config(root), tiny.random_target()[0]
    frozen = target.config
    block = tiny.replaced(
        frozen.block, width=256, num_heads=4, num_kv_heads=2, head_width=64
    )
    frozen = tiny.replaced(frozen, block=block, compute_dtype="bfloat16")
    wide = target._replace(config=frozen)
    config = tiny.replaced(config, compute_dtype="bfloat16")
    return config, wide, run_config.drafter_configs(config, wide)


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(_dispatch, "compute_capability", lambda: (9, 0))
    monkeypatch.setattr("pallas_kernels._compat.mosaic_gpu_missing", lambda: None)


def named(wide, tiny, name, **changes):
    config, target, drafters = wide
    train = tiny.replaced(config.train, attention=name)
    drafters = tuple(tiny.replaced(d, **changes) for d in drafters)
    return tiny.replaced(config, train=train), target, drafters


def test_auto_takes_the_kernel_and_cudnn(wide, tiny, hopper):
    found = attending.report(*named(wide, tiny, "auto"))
    assert found == {"blocks": "mosaic_gpu", "target": "cudnn", "refused": {}}
    assert attending.describe(found) == "attention: blocks mosaic_gpu, target cudnn"
    for name in ("auto", "mosaic_gpu", "cudnn", "xla"):
        attending.check(*named(wide, tiny, name))


def test_a_fallback_is_said(wide, tiny, hopper):
    found = attending.report(*named(wide, tiny, "auto", compute_dtype="float16"))
    assert found["blocks"] == "cudnn"
    assert attending.describe(found) == (
        "attention: blocks cudnn, target cudnn (not mosaic_gpu: wgmma multiplies "
        "bfloat16 keys and queries, got float16 and float16)"
    )


def test_xla_is_xla_throughout(wide, tiny, hopper):
    found = attending.report(*named(wide, tiny, "xla"))
    assert found == {"blocks": "xla", "target": "xla", "refused": {}}


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("mosaic_gpu", {"compute_dtype": "float32"}, "blocks here: wgmma multiplies"),
        ("mosaic_gpu", {"block_size": 40}, "blocks here: a block's rows of one kv"),
        ("cudnn", {"compute_dtype": "float32"}, "blocks here: cuDNN takes bfloat16"),
    ],
)
def test_a_name_is_refused(wide, tiny, hopper, name, changes, message):
    with pytest.raises(
        ValueError, match=rf"train\.attention = '{name}' can't run {re.escape(message)}"
    ):
        attending.check(*named(wide, tiny, name, **changes))


def test_cudnn_is_refused_for_the_target(wide, tiny, hopper):
    config, target, drafters = named(wide, tiny, "cudnn")
    frozen = tiny.replaced(target.config, compute_dtype="float32")
    with pytest.raises(ValueError, match="can't run the target here: cuDNN takes"):
        attending.check(config, target._replace(config=frozen), drafters)
