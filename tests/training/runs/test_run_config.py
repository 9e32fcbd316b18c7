"""The configuration of a run: strict files, changes, rules."""

import dataclasses

import pytest

from dspark_jax.training.runs import run_config


@pytest.fixture(name="path")
def _path(root):
    return root / "tests" / "training" / "two_drafters.toml"


def test_the_shipped_configuration_and_changes(path):
    found = run_config.load(
        path,
        [
            "train.learning_rate=3e-4",
            "drafters.0.num_layers = 2",
            "target=./folder",
            "tap_layers=[0, 4]",
            "steps=10",
        ],
    )
    assert found.train.learning_rate == 3e-4
    assert [spec.num_layers for spec in found.drafters] == [2, 3]
    assert (found.target, found.tap_layers) == ("./folder", (0, 4))
    assert found.steps == 10
    assert run_config.load(path, ["steps=10", "steps="]).steps is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("steps", "a change must read key=value, got 'steps'"),
        ("step=3", "unknown key 'step'; known keys: .*; the nearest one is 'steps'"),
        (
            "train.num_anchor=3",
            "unknown key 'train.num_anchor'; .*; the nearest one is 'num_anchors'",
        ),
        ("drafters.5.num_layers=3", "there is no entry '5'"),
        ("seed.a=3", "there is no table 'seed'"),
        ("steps=0", "steps must be at least 1, got 0"),
        ("keep_every=0", "keep_every must be at least 1, got 0"),
        ("log_every=0", "log_every must be at least 1, got 0"),
        ("fsdp=0", "fsdp must be at least 1, got 0"),
        ("train_seconds=inf", "train_seconds must be positive and finite, got inf"),
        ("checkpoint_seconds=0.0", "checkpoint_seconds must be positive and finite"),
        ("seed=-1", r"seed must lie in 0\.\.2\^32-1, got -1"),
        ("compute_dtype=int8", "compute_dtype must be one of .*, got 'int8'"),
        ('corpus=""', "corpus must not be empty"),
        ("drafters=[]", "drafters must name at least one drafter"),
        ("drafters.0.name=../x", "a drafter's name becomes a folder: .*'../x'"),
        (
            "drafters.0.name=no-markov-smollm2-135m",
            "drafters must have different names",
        ),
        ("held_out_rows=100", "held_out_rows must be a multiple of batch_rows = 64"),
        ("micro_steps=3", "batch_rows must be a multiple of micro_steps = 3, got 64"),
        ("max_prefix=320", "max_prefix must be below row_length = 320, got 320"),
        ("max_rows=100", "max_rows must hold write_rows, .* at least 2048, got 100"),
        ("mask_token=-1", "mask_token and never_sampled must hold ids >= 0"),
    ],
)
def test_bad_values(path, change, message):
    with pytest.raises(ValueError, match=message):
        run_config.load(path, [change])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("steps=3.5", "steps must be int, got 3.5"),
        ("train.learning_rate=fast", "train.learning_rate must be float, got 'fast'"),
        ("tap_layers=3", "tap_layers must be a list, got int"),
        ("train=3", "train must be a table, got int"),
        ("plots=1", "plots must be bool, got 1"),
    ],
)
def test_wrong_types_name_the_key(path, change, message):
    with pytest.raises(TypeError, match=message):
        run_config.load(path, [change])


def test_damaged_files(tmp_path):
    for data in (b"steps = = 3", b"\xff\xfe"):
        (tmp_path / "bad.toml").write_bytes(data)
        with pytest.raises(ValueError, match=r"bad.toml is not valid TOML"):
            run_config.load(tmp_path / "bad.toml")


def test_every_value_is_written_and_read_again(path, tmp_path):
    text = 'a "quoted" \\ path\n\ttab'
    found = run_config.load(path)
    found = dataclasses.replace(
        found, target=text, plots=True, keep_every=1000, train_seconds=1e-3
    )
    (tmp_path / "a.toml").write_text(run_config.to_toml(found))
    assert run_config.load(tmp_path / "a.toml") == found
    assert "# steps is absent" in (tmp_path / "a.toml").read_text()


def test_differences(path):
    old = run_config.load(path)
    new = run_config.load(path, ["seed=3", "drafters.1.num_layers=1", "fsdp=2"])
    assert run_config.differences(old, old) == []
    assert run_config.differences(old, new) == [
        "drafters.1.num_layers: 3 -> 1",
        "seed: 0 -> 3",
    ]


def test_shipped_configurations_are_valid(root):
    if not (root / "configs").is_dir():
        pytest.skip("an installed package has no configs/")
    found = sorted((root / "configs").glob("*.toml"))
    assert len(found) >= 4
    for path in found:
        run_config.load(path)
