"""The GGUF reader: dequantisation, metadata, and hostile files."""

import math
import struct

import numpy as np
import pytest

from dspark_jax.targets import gguf

F32, F16, Q4_0, Q4_1, Q8_0, BF16 = 0, 1, 2, 3, 8, 30


@pytest.mark.parametrize("kind", [F32, F16, Q4_0, Q4_1, Q8_0, BF16])
def test_dequantised_values_are_the_formats_own(path, gguf_writer, kind):
    values = np.random.default_rng(kind).normal(size=(3, 64)).astype(np.float32)
    meant = gguf_writer.build(path, items={"x": (values, kind)})["x"]
    found = gguf.tensor(gguf.read(path), "x")
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, meant, rtol=1e-6, atol=1e-7)
    assert np.abs(found - values).max() < {Q4_0: 0.4, Q4_1: 0.3}.get(kind, 0.02)


def test_metadata_of_every_type(path, gguf_writer):
    meta = gguf_writer.metadata()
    for kind, code, number in (
        (0, "B", 7),
        (1, "b", -7),
        (2, "H", 7),
        (3, "h", -7),
        (5, "i", -7),
        (10, "Q", 2**60),
        (11, "q", -(2**60)),
        (12, "d", 0.1),
    ):
        meta[f"x.{kind}"] = struct.pack(f"<I{code}", kind, number)
    gguf_writer.build(path, meta)
    found = gguf.read(path).metadata
    assert [found[f"x.{k}"] for k in (0, 1, 2, 3, 5, 10, 11, 12)] == [
        7,
        -7,
        7,
        -7,
        -7,
        2**60,
        -(2**60),
        0.1,
    ]
    assert found["a.flag"] is True
    assert found["tokenizer.ggml.tokens"] == [
        "<|im_end|>",
        "a",
        "b",
        "ab",
        "<|endoftext|>",
        "c",
    ]


ROW = {"x": (np.zeros((2, 32), np.float32), Q8_0), "y": (np.zeros(8, np.float32), F32)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"cut": 1},
            "'y' must lie within the file's .* bytes, aligned to 32, got 32 by",
        ),
        ({"offsets": {"x": 2**63}}, "'x' must lie within the file's"),
        ({"offsets": {"x": 8}}, "'x' must lie within the file's .* aligned to 32"),
        ({"offsets": {"y": 32}}, "tensors 'x' and 'y' overlap"),
        ({"dims": {"x": (2**40, 2**40)}}, "'x' must lie within the file's"),
        ({"dims": {"x": (0, 2)}}, "'x' of type Q8_0 must have rows of a positive"),
        (
            {"dims": {"x": (33, 2)}},
            "'x' of type Q8_0 must have rows of a positive multi",
        ),
        ({"dims": {"x": (32,) * 5}}, "'x' must have 1 to 4 axes, got 5"),
        ({"dims": {"x": ()}}, "'x' must have 1 to 4 axes, got 0"),
        ({"kinds": {"x": 12}}, "'x' has tensor type 12; supported: F32, F16, Q4_0"),
        (
            {"meta": {"k": struct.pack("<I", 99)}},
            "'k' has unknown value type 99",
        ),
        (
            {"meta": {"k": struct.pack("<IIQ", 9, 9, 1)}},
            "'k' is an array of unsupported type 9",
        ),
        (
            {"meta": {"k": struct.pack("<IIQ", 9, 4, 2**62)}},
            "length of 'k' must be at most 16777216, got",
        ),
        (
            {"meta": {"k": struct.pack("<IIQ", 9, 4, 10**6)}},
            "is truncated: 4000000 bytes wanted at",
        ),
        (
            {"meta": {"k": struct.pack("<IIQ", 9, 8, 10**6)}},
            "length of a string must be at most 16777216|is truncated",
        ),
        (
            {"meta": {"k": struct.pack("<IQ", 8, 2**40)}},
            "length of a string must be at most 16777216",
        ),
        ({"meta": {"k": struct.pack("<IQ", 8, 2) + b"\xff\xff"}}, "is not UTF-8"),
    ],
)
def test_hostile_files_are_refused(path, gguf_writer, arguments, message):
    gguf_writer.build(path, **{"items": ROW, "meta": {}, **arguments})
    with pytest.raises(ValueError, match=message):
        gguf.read(path)


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (b"", "is not a GGUF file: 0 bytes"),
        (b"PK\x03\x04" + bytes(40), r"is not a GGUF file: it begins with b'PK"),
        (b"GGUF" + struct.pack("<IQQ", 2, 0, 0), "GGUF version must be 3, got 2"),
        (
            b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
            "GGUF version must be 3, got 50331648",
        ),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0),
            "number of tensors must be at most",
        ),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60),
            "number of metadata entries must b",
        ),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1), "is truncated: 8 bytes wanted at 24"),
    ],
)
def test_heads_that_are_not_ggufs(path, head, message):
    path.write_bytes(head)
    with pytest.raises(ValueError, match=message):
        gguf.read(path)


def test_names_that_occur_twice(path, gguf_writer):
    pair = gguf_writer.string("k") + gguf_writer.value(1)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + pair + pair)
    with pytest.raises(ValueError, match="metadata key 'k' occurs twice"):
        gguf.read(path)
    entry = gguf_writer.string("x") + struct.pack("<IQIQ", 1, 1, F32, 0)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 2, 0) + entry + entry + bytes(99))
    with pytest.raises(ValueError, match="tensor 'x' occurs twice"):
        gguf.read(path)


@pytest.mark.parametrize("kind", [Q4_0, Q4_1, Q8_0])
@pytest.mark.parametrize("bits", [0x7C00, 0xFC00, 0x7E00])  # inf, -inf, NaN
def test_blocks_that_are_not_finite_are_refused(path, gguf_writer, kind, bits):
    gguf_writer.build(path, items={"x": (np.ones((2, 32), np.float32), kind)})
    content = path.read_bytes()
    start = gguf.read(path).tensors["x"].start
    places = [start] + [start + 2] * (kind == Q4_1)  # the scale, the minimum
    for place in places:
        path.write_bytes(
            content[:place] + struct.pack("<H", bits) + content[place + 2 :]
        )
        with pytest.raises(ValueError, match="'x' holds values that are not finite"):
            gguf.tensor(gguf.read(path), "x")


def test_jax_takes_a_tensor_over_without_a_copy(path, gguf_writer):
    gguf_writer.build(path, items={"x": (np.ones((7, 32), np.float32), Q8_0)})
    assert gguf.tensor(gguf.read(path), "x").ctypes.data % 64 == 0


@pytest.mark.parametrize("kind", [F32, F16, BF16])
def test_values_that_are_not_finite_are_refused(path, gguf_writer, kind):
    gguf_writer.build(path, items={"x": (np.asarray([1, math.inf], np.float32), kind)})
    with pytest.raises(ValueError, match="tensor 'x' holds values that are not finite"):
        gguf.tensor(gguf.read(path), "x")
