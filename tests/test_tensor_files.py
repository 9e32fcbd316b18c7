"""Safetensors files: round trips, atomic writes, and hostile inputs."""

import contextlib
import json
import os

import hypothesis
import ml_dtypes
import numpy as np
import pytest
from hypothesis import strategies as st

from dspark_jax import tensor_files

BF16 = np.dtype(ml_dtypes.bfloat16)


def raw(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize(
    "dtype", [np.float32, np.float16, BF16, np.int64, np.int32, np.uint8, np.bool_]
)
def test_round_trip_keeps_every_bit(tmp_path, dtype):
    values = np.arange(6).reshape(2, 3).astype(dtype)
    tensors = {"a": values, "transposed": values.T, "scalar": values[1, 2]}
    tensor_files.write(tmp_path / "x.safetensors", tensors)
    found = tensor_files.read(tmp_path / "x.safetensors")
    assert set(found) == set(tensors)
    for name, expected in tensors.items():
        assert found[name].dtype == np.dtype(dtype)
        assert found[name].shape == expected.shape
        np.testing.assert_array_equal(found[name], expected)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"x\.safetensors is not a valid safetensors file: .*header too small"),
        (b"\x00\x00", "not a valid safetensors file: .*header too small"),
        (raw({"a": entry()}, b"12345678")[:20], "not a valid .*invalid header length"),
        ((2**62).to_bytes(8, "little") + b"{}", "not a valid .*header too large"),
        (raw(b"not json"), "not a valid .*invalid JSON"),
        (raw(b"[" * 200_000), "not a valid safetensors file"),
        (raw({"a": entry()}, b"1234"), "not a valid .*not fully covered"),
        (raw({"a": entry(offsets=(0, 80))}, b"12345678"), "not a valid safetensors"),
        (raw({"a": entry(offsets=(8, 0))}, b"12345678"), "not a valid safetensors"),
        (
            raw({"a": entry(), "b": entry(offsets=(4, 12))}, b"0" * 12),
            "not a valid safetensors",
        ),
        (raw({"a": entry(shape=(2**40, 2**40))}, b"12345678"), "not a valid"),
        (raw({"a": entry("X32")}, b"12345678"), "unknown variant `X32`"),
        (
            raw({"a": entry("F64", (1,))}, b"12345678"),
            r"'a' has dtype F64; supported: F32, F16, BF16, I64, I32, U8, BOOL",
        ),
        (b"\x80\x04\x95pickle, never loaded", "not a valid safetensors file"),
    ],
)
def test_hostile_files_are_refused_by_name(tmp_path, content, message):
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        tensor_files.read(tmp_path / "x.safetensors")


@hypothesis.given(st.binary(max_size=200), st.booleans())
def test_random_bytes_are_a_value_error(tmp_path_factory, content, has_length):
    path = tmp_path_factory.getbasetemp() / "random.safetensors"
    path.write_bytes(raw(content) if has_length else content)
    with contextlib.suppress(ValueError):
        assert isinstance(tensor_files.read(path), dict)


def test_shards_are_read_through_their_index(tmp_path):
    tensor_files.write(tmp_path / "one.safetensors", {"a": np.float32([1])})
    tensor_files.write(tmp_path / "two.safetensors", {"b": np.float32([2])})
    weight_map = {"a": "one.safetensors", "b": "two.safetensors"}
    tensor_files.write_json(
        tmp_path / tensor_files.INDEX_FILE, {"weight_map": weight_map}
    )
    assert {k: v.item() for k, v in tensor_files.read_folder(tmp_path).items()} == {
        "a": 1,
        "b": 2,
    }


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": "../x.safetensors"}, r"files of the same folder, got '\.\./x\.safe"),
        ({"a": "/x.safetensors"}, "files of the same folder, got '/x.safetensors'"),
        ({"a": "C:x.safetensors"}, "files of the same folder, got 'C:x.safetensors'"),
        ({"a": "..\\x.safetensors"}, "files of the same folder"),
        ({"a": ".safetensors"}, "files of the same folder"),
        (
            {"a": "x.bin"},
            r"must be \.safetensors files of the same folder, got 'x.bin'",
        ),
        ({"a": 3}, "files of the same folder, got 3 for 'a'"),
        ({"a": "none.safetensors"}, "names 'none.safetensors', which is not in the"),
        (
            {"a": "one.safetensors", "b": "one.safetensors"},
            "lacks 'b', which the index",
        ),
        ({"c": "one.safetensors"}, "lacks 'c'"),
        ({}, "must hold a non-empty object 'weight_map'"),
        (None, "must hold a non-empty object 'weight_map'"),
    ],
)
def test_hostile_indices_are_refused(tmp_path, weight_map, message):
    tensor_files.write(tmp_path / "one.safetensors", {"a": np.float32([1])})
    tensor_files.write_json(
        tmp_path / tensor_files.INDEX_FILE, {"weight_map": weight_map}
    )
    with pytest.raises(ValueError, match=message):
        tensor_files.read_folder(tmp_path)


def test_a_shard_with_more_than_the_index_says_is_refused(tmp_path):
    tensor_files.write(tmp_path / "one.safetensors", dict.fromkeys("ab", np.float32(1)))
    index = {"weight_map": {"a": "one.safetensors"}}
    tensor_files.write_json(tmp_path / tensor_files.INDEX_FILE, index)
    with pytest.raises(ValueError, match="holds 'b', which the index does not place"):
        tensor_files.read_folder(tmp_path)


def test_a_folder_without_safetensors_is_refused(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"never read")
    with pytest.raises(FileNotFoundError, match="only safetensors weights are read"):
        tensor_files.read_folder(tmp_path)
    with pytest.raises(FileNotFoundError, match="is not a file"):
        tensor_files.read(tmp_path / "x.safetensors")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", r"config\.json is not valid JSON"),
        (b"\xff\xfe\xfa", "is not valid JSON"),
        (b"[" * 200_000, "is not valid JSON"),
        (b"[1]", "must hold a JSON object, got list"),
    ],
)
def test_bad_json_is_refused_by_name(tmp_path, content, message):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        tensor_files.read_json(tmp_path / "config.json")


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "x.safetensors"
    tensor_files.write(path, {"a": np.float32([1])})
    before = path.read_bytes()

    def fail(handle):
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        tensor_files.write(path, {"a": np.float32([2])})
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["x.safetensors"]


def test_unknown_dtypes_are_not_written(tmp_path):
    with pytest.raises(
        ValueError, match=r"'a' must be one of float32, .* got complex64"
    ):
        tensor_files.write(tmp_path / "x.safetensors", {"a": np.complex64([1])})
    assert os.listdir(tmp_path) == []


def test_written_files_have_the_usual_permissions(tmp_path):
    tensor_files.write(tmp_path / "x.safetensors", {"a": np.float32([1])})
    (tmp_path / "plain").write_bytes(b"")
    modes = {path.stat().st_mode for path in tmp_path.iterdir()}
    assert len(modes) == 1


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, "here: missing 'a'"),
        ({"a": np.zeros((2, 3), np.float32)}, "here: missing 'b'"),
        (
            {"a": np.zeros((3, 2), np.float32), "c": np.zeros(1, np.float32)},
            r"here: missing 'b'; unexpected 'c'; 'a' must have shape \(2, 3\), got "
            r"\(3, 2\)",
        ),
        (
            {"a": np.zeros((2, 3), np.int32), "b": np.zeros(1, BF16)},
            "'a' must be float32, bfloat16 or float16, got int32",
        ),
    ],
)
def test_check_tensors_names_the_first_of_each(tensors, message):
    with pytest.raises(ValueError, match=message):
        tensor_files.check_tensors(tensors, {"a": (2, 3), "b": (1,)}, "here")


def test_one_tensor_is_read(tmp_path):
    values = {"a": np.arange(3, dtype=np.float32), "b": np.ones(2, BF16)}
    for name, value in values.items():
        tensor_files.write(tmp_path / f"{name}.safetensors", {name: value})
    index = {"weight_map": {name: f"{name}.safetensors" for name in values}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    found = tensor_files.read_tensor(tmp_path, "b")
    assert found.dtype == BF16
    np.testing.assert_array_equal(found, values["b"])
    with pytest.raises(ValueError, match=r"index\.json does not name 'c'"):
        tensor_files.read_tensor(tmp_path, "c")
    tensor_files.write(tmp_path / "model.safetensors", values)
    np.testing.assert_array_equal(tensor_files.read_tensor(tmp_path, "a"), values["a"])
    with pytest.raises(ValueError, match=r"model\.safetensors: 'c' cannot be read"):
        tensor_files.read_tensor(tmp_path, "c")
    with pytest.raises(FileNotFoundError, match="has neither model"):
        tensor_files.read_tensor(tmp_path / "none", "a")
