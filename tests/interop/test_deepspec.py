"""DeepSpec's layout: bit-equal round trips, shared tables, tensors that do not fit."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import tensor_files
from dspark_jax.config import BlockConfig, DrafterConfig, RopeConfig
from dspark_jax.drafters import dspark
from dspark_jax.interop import deepspec
from dspark_jax.targets.load import load_target
from dspark_jax.types import Target

pytestmark = pytest.mark.usefixtures("quick_compilation")

CASES = {  # case -> (block_size, markov_kind, confidence_kind, tap_layers)
    "dflash_b7": (7, "none", "none", (0, 1, 2)),
    "dspark_gated_b4": (4, "gated", "markov", (0, 1, 2)),
    "dspark_gated_b7": (7, "gated", "markov", (0, 1, 2)),
    "dspark_rnn_b4": (4, "rnn", "markov", (0, 1, 2)),
    "dspark_rnn_b7": (7, "rnn", "markov", (0, 1, 2)),
    "dspark_vanilla_b4": (4, "vanilla", "markov", (0, 1, 2)),
    "dspark_vanilla_b4_confplain": (4, "vanilla", "plain", (0, 1, 2)),
    "dspark_vanilla_b7": (7, "vanilla", "markov", (0, 1, 2)),
    "dspark_vanilla_b7_tied": (7, "vanilla", "markov", (-1, 1, 2)),
}


def folder_of(golden, case):
    return golden / "cases" / case / "drafter"


@pytest.fixture
def vanilla(golden, tmp_path):
    """A copy of one drafter, to damage."""
    shutil.copytree(folder_of(golden, "dspark_vanilla_b4"), tmp_path / "drafter")
    return tmp_path / "drafter"


def edit_tensors(folder, change):
    tensors = tensor_files.read(folder / "model.safetensors")
    change(tensors)
    tensor_files.write(folder / "model.safetensors", tensors)


@pytest.mark.parametrize("case", CASES)
def test_golden_checkpoints_round_trip_byte_by_byte(golden, tmp_path, case):
    folder = folder_of(golden, case)
    config, params, extra = deepspec.load(folder)
    found = (
        config.block_size,
        config.markov_kind,
        config.confidence_kind,
        config.tap_layers,
    )
    assert found == CASES[case]
    assert (config.mask_token, config.num_target_layers) == (127, 4)
    assert extra["architectures"] == ["Qwen3DSparkModel"]
    assert extra["num_anchors"] == 10
    deepspec.save(tmp_path, config, params, extra_config=extra)
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes(), name


@pytest.mark.parametrize("case", CASES)
def test_loaded_parameters_are_those_the_configuration_asks_for(golden, case):
    config, params, _ = deepspec.load(folder_of(golden, case))
    body = params.replace(embed=None, head=None)
    shapes = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)  # noqa: E731
    assert shapes(body) == shapes(dspark.abstract(config))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("attention_bias", [False, True])
@pytest.mark.parametrize(
    ("markov_kind", "confidence_kind"),
    [
        ("none", "none"),
        ("none", "plain"),
        ("vanilla", "none"),
        ("gated", "plain"),
        ("rnn", "markov"),
    ],
)
def test_made_drafters_round_trip(
    tmp_path, dtype, attention_bias, markov_kind, confidence_kind
):
    config = DrafterConfig(
        vocab_size=24,
        num_layers=2,
        block=BlockConfig(
            width=8,
            num_heads=4,
            num_kv_heads=2,
            head_width=4,
            ffn_width=12,
            qk_norm=True,
            attention_bias=attention_bias,
            output_bias=attention_bias,
            rope=RopeConfig(kind="llama3", theta=5e5, factor=8.0),
        ),
        max_position=64,
        block_size=5,
        mask_token=23,
        tap_layers=(-1, 2),
        num_target_layers=4,
        markov_kind=markov_kind,
        markov_rank=0 if markov_kind == "none" else 3,
        confidence_kind=confidence_kind,
        param_dtype=dtype,
        compute_dtype=dtype,
        target_fingerprint="0123456789abcdef",
    )
    params = dspark.init(jax.random.key(0), config)
    deepspec.save(tmp_path, config, params)
    found, loaded, extra = deepspec.load(tmp_path)
    assert found == config
    jax.tree.map(np.testing.assert_array_equal, loaded, params)
    assert {"architectures", "num_anchors", "use_cache"} <= set(extra)
    table = jnp.ones((24, 8), dtype)
    deepspec.save(tmp_path, config, params, embed=table, head=2 * table)
    _, loaded, _ = deepspec.load(tmp_path)
    assert float(loaded.embed[0, 0]) == 1
    assert float(loaded.head[0, 0]) == 2


def test_tables_equal_to_the_targets_are_dropped(golden, tmp_path):
    for case, name in (
        ("dspark_vanilla_b7", "qwen3_untied"),
        ("dspark_vanilla_b7_tied", "qwen3_tied"),
    ):
        target, target_params = load_target(golden / "targets" / name)
        folder = folder_of(golden, case)
        _, params, _ = deepspec.load(folder, target, target_params=target_params)
        assert params.embed is None
        assert params.head is None
        # Through its functions alone, as for a target of the user's own.
        opaque = {"inside": target_params}
        wrapped = Target(
            target.config,
            target.init_cache,
            target.forward,
            lambda p, h, unembed=target.unembed: unembed(p["inside"], h),
            lambda p, i, embed=target.embed: embed(p["inside"], i),
        )
        _, params, _ = deepspec.load(folder, wrapped, target_params=opaque)
        assert params.embed is None
        assert params.head is None
        _, params, _ = deepspec.load(folder)
        assert params.embed.shape == params.head.shape == (128, 32)


def test_tables_of_its_own_are_kept_and_written(golden, tmp_path):
    target, target_params = load_target(golden / "targets" / "qwen3_untied")
    shutil.copytree(folder_of(golden, "dspark_rnn_b4"), tmp_path / "drafter")

    def nudge(tensors):
        tensors["lm_head.weight"][0, 0] = np.nextafter(
            tensors["lm_head.weight"][0, 0], np.float32(np.inf)
        )

    edit_tensors(tmp_path / "drafter", nudge)
    config, params, _ = deepspec.load(
        tmp_path / "drafter", target, target_params=target_params
    )
    assert params.embed is None
    assert params.head is not None
    deepspec.save(tmp_path / "again", config, params)
    names = set(tensor_files.read(tmp_path / "again" / "model.safetensors"))
    assert "lm_head.weight" in names
    assert "embed_tokens.weight" not in names
    assert deepspec.load(tmp_path / "again")[1].embed is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("fc.weight"), "missing 'fc.weight'"),
        (
            lambda t: t.pop("markov_head.markov_w2.weight"),
            "missing 'markov_head.markov_w2.weight'",
        ),
        (
            lambda t: t.update({"markov_head.joint_proj.bias": np.ones(8, np.float32)}),
            "unexpected 'markov_head.joint_proj.bias'",
        ),
        (
            lambda t: t.update({"lm_head.weight": np.ones((64, 32), np.float32)}),
            r"'lm_head.weight' must have shape \(128, 32\), got \(64, 32\)",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(vanilla, change, message):
    edit_tensors(vanilla, change)
    with pytest.raises(ValueError, match=message):
        deepspec.load(vanilla)


def test_a_folder_without_config_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        deepspec.load(tmp_path)


def test_tables_of_the_wrong_shape_are_not_written(golden, tmp_path):
    config, params, _ = deepspec.load(folder_of(golden, "dspark_vanilla_b4"))
    params = params.replace(embed=None, head=None)
    with pytest.raises(ValueError, match=r"'lm_head.weight' must have shape"):
        deepspec.save(tmp_path / "new", config, params, head=jnp.ones((2, 2)))
    assert not (tmp_path / "new").exists()
