"""DeepSpec's target cache: the golden one, and what is refused of damaged ones."""

import json
import shutil

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from dspark_jax.training.texts import target_cache


@pytest.fixture(scope="module")
def expected(golden):
    path = golden / "target_cache" / "expected.safetensors"
    return safetensors.numpy.load_file(path)


@pytest.fixture
def folder(golden, tmp_path):
    shutil.copytree(golden / "target_cache" / "cache", tmp_path / "cache")
    return tmp_path / "cache"


def load(folder, **options):
    return target_cache.load_target_cache(folder, vocab_size=128, **options)


def test_golden_samples(golden, expected):
    cache = load(golden / "target_cache" / "cache", width=32, tap_layers=(0, 1, 2))
    assert (cache.num_samples, cache.width, cache.tap_layers) == (4, 32, (0, 1, 2))
    assert cache.target_name == "targets/qwen3_untied"
    index = json.loads((golden / "target_cache" / "index.json").read_text())
    assert cache.lengths.tolist() == [r["seq_len"] for r in index["records"]]
    for number in range(4):
        sample = cache.sample(number)
        assert sample.taps.dtype == ml_dtypes.bfloat16
        for name, found in (
            ("input_ids", sample.tokens),
            ("loss_mask", sample.loss_mask),
            ("target_hidden_states", sample.taps),
            ("target_last_hidden_states", sample.hidden),
        ):
            np.testing.assert_array_equal(found, expected[f"sample{number}.{name}"])


def test_golden_collation(golden, expected):
    cache = load(golden / "target_cache" / "cache")
    batch, states = cache.take(range(4))
    for name, found in (
        ("input_ids", batch.tokens),
        ("loss_mask", batch.loss_mask),
        ("target_hidden_states", states.taps),
        ("target_last_hidden_states", states.hidden),
    ):
        np.testing.assert_array_equal(found, expected[f"collated.{name}"])
    batch, states = cache.take([3, 1], multiple=16)
    assert batch.tokens.shape == (2, 32)
    assert states.taps.shape == (2, 32, 96)
    assert not states.hidden[0, 12:].any()


def test_batches_by_step(golden):
    cache = load(golden / "target_cache" / "cache")
    batches = target_cache.CacheBatches(cache, 3, 2, multiple=8)
    assert batches.num_batches_per_epoch == 2
    again = target_cache.CacheBatches(cache, 3, 2, multiple=8)
    for step in (5, 0, 3):
        batch, states = batches.at(step)
        other, other_states = again.at(step)
        assert batch.tokens.shape[1] % 8 == 0
        np.testing.assert_array_equal(batch.tokens, other.tokens)
        np.testing.assert_array_equal(states.taps, other_states.taps)
    rows = [row.tobytes() for s in (0, 1) for row in batches.at(s)[0].tokens[:, :12]]
    assert len(set(rows)) == 4  # an epoch has every sample
    with pytest.raises(ValueError, match="`step` must be at least 0, got -1"):
        batches.at(-1)
    with pytest.raises(ValueError, match="`batch_rows` must be at least 1, got 0"):
        target_cache.CacheBatches(cache, 0, 0)


def manifest(**fields):
    def damage(folder):
        path = folder / "manifest.json"
        values = json.loads(path.read_text()) | fields
        path.write_text(json.dumps({k: v for k, v in values.items() if v != "absent"}))

    return damage


def shard(**fields):
    second = {"shard_id": 1, "file_name": "shard-00001.bin"}
    first = {"shard_id": 0, "file_name": "shard-00000.bin"} | fields
    return manifest(shards=[first, second])


def record(number, **fields):
    def damage(folder):
        path = folder / "samples.idx"
        values = np.fromfile(path, target_cache._FIELDS)
        for name, value in fields.items():
            values[name][number] = value
        values.tofile(path)

    return damage


def resize(name, change):
    def damage(folder):
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(change(data))

    return damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (manifest(version=1), "version must be 2, got 1"),
        (manifest(hidden_dtype="float32"), "hidden_dtype must be 'bfloat16', got"),
        (manifest(index_record_size=55), "index_record_size must be 56, got 55"),
        (manifest(hidden_size="absent"), "manifest.json lacks 'hidden_size'"),
        (manifest(hidden_size=0), r"hidden_size must be an integer in 1\.\.16777216"),
        (manifest(hidden_size=2**40), "hidden_size must be an integer in"),
        (manifest(num_samples=True), "num_samples must be an integer in"),
        (manifest(num_samples=5), "samples.idx must have 5 records of 56 bytes, got"),
        (manifest(target_layer_ids=[1, 0]), "must be increasing integers from -1 on"),
        (manifest(target_layer_ids=[-2, 0]), "must be increasing integers from -1 on"),
        (manifest(target_layer_ids=[]), "must be increasing integers from -1 on"),
        (manifest(target_layer_ids=list(range(5000))), "must be increasing integers"),
        (manifest(num_shards=3), "shards must be a list of 3 entries"),
        (shard(shard_id=1), "shard 0 must have this shard_id and a file_name, got"),
        (shard(file_name=None), "shard 0 must have this shard_id and a file_name"),
        (shard(file_name="../x.bin"), "shards must be files of the same folder, got"),
        (shard(file_name=".bin"), "shards must be files of the same folder, got"),
        (manifest(hidden_size=64), "record 1 must have its taps inside a shard"),
        (record(1, sample_id=7), "record 1 must have its own number as sample_id, got"),
        (record(2, shard_id=2), "record 2 must have a shard_id below 2, got 2"),
        (record(0, length=0), r"record 0 must have 1\.\.1048576 tokens, got 0"),
        (record(0, length=2**32 - 1), r"record 0 must have 1\.\.1048576 tokens"),
        (record(3, taps=2**64 - 1), "record 3 must have its taps inside a shard, got"),
        (record(3, hidden=2**63), "record 3 must have its hidden inside a shard"),
        (record(3, tokens=11_000), "record 3 must have its tokens inside a shard"),
        (
            resize("shard-00001.bin", lambda data: data[:-1]),
            "record 3 must have its hidden inside a shard",
        ),
        (resize("samples.idx", lambda data: data[:-1]), "got 223 bytes"),
        (resize("samples.idx", lambda data: b""), "samples.idx is empty"),
        (resize("manifest.json", lambda data: b"[]"), "must hold a JSON object"),
    ],
)
def test_damaged_caches_are_refused(folder, damage, message):
    damage(folder)
    with pytest.raises(ValueError, match=message):
        load(folder)


@pytest.mark.parametrize(
    ("offset", "value", "message"),
    [
        (0, b"\x80\0\0\0", r"sample 0 must hold ids in 0\.\.127, got \d+\.\.128"),
        (0, b"\xff\xff\xff\xff", r"sample 0 must hold ids in 0\.\.127, got -1"),
        (84, b"\0", "sample 0: attention_mask must be 1 everywhere"),
        (105, b"\2", "sample 0: loss_mask must be 0 or 1, got 2"),
    ],
)
def test_bad_values_are_refused(folder, offset, value, message):
    def put(data):
        return data[:offset] + value + data[offset + len(value) :]

    resize("shard-00000.bin", put)(folder)
    with pytest.raises(ValueError, match=message):
        load(folder).sample(0)


def test_another_target_is_refused(folder):
    with pytest.raises(ValueError, match="hidden_size is 32, the target's width is 64"):
        load(folder, width=64)
    with pytest.raises(
        ValueError, match=r"target_layer_ids are \[0, 1, 2\], the drafter taps \[0, 2\]"
    ):
        load(folder, tap_layers=(0, 2))
    with pytest.raises(IndexError, match="sample 4 of a cache of 4"):
        load(folder).sample(4)


def test_missing_files_are_named(folder, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"it has no manifest\.json"):
        load(tmp_path)
    (folder / "shard-00001.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"shard-00001\.bin is missing"):
        load(folder)
