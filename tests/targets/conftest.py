"""A writer of GGUF files, for tests: tiny models, made well or badly.

Tests take it as the fixture `gguf_writer` (a module is not importable from here).
"""

import struct
import types

import numpy as np
import pytest

F32, F16, Q4_0, Q4_1, Q8_0, BF16 = 0, 1, 2, 3, 8, 30
WIDTH, HEADS, KV_HEADS, FFN, LAYERS = 32, 4, 2, 64, 2
TOKENS = ["<|im_end|>", "a", "b", "ab", "<|endoftext|>", "c"]


def string(text):
    data = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(data)) + data


def value(item):
    """One metadata value: its type, then its bytes."""
    if isinstance(item, bytes):
        return item  # made by hand
    if isinstance(item, str):
        return struct.pack("<I", 8) + string(item)
    if isinstance(item, bool):
        return struct.pack("<IB", 7, item)
    if isinstance(item, int):
        return struct.pack("<II", 4, item)
    if isinstance(item, float):
        return struct.pack("<If", 6, item)
    head = struct.pack("<I", 9)
    if item and isinstance(item[0], str):
        return head + struct.pack("<IQ", 8, len(item)) + b"".join(map(string, item))
    return head + struct.pack(f"<IQ{len(item)}i", 5, len(item), *item)


def quantise(values, kind):
    """(bytes as stored, the values they mean)."""
    if kind == F32:
        return values.astype("<f4").tobytes(), values
    if kind == F16:
        return values.astype("<f2").tobytes(), values.astype("<f2").astype(np.float32)
    if kind == BF16:
        bits = values.view("<u4") >> 16
        return bits.astype("<u2").tobytes(), (bits << 16).view(np.float32)
    blocks = values.reshape(-1, 32)
    out, meant = [], []
    for block in blocks:
        low, high = float(block.min()), float(block.max())
        if kind == Q8_0:
            scale = np.float16(max(abs(low), high) / 127 or 1)
            codes = np.clip(np.rint(block / np.float32(scale)), -127, 127)
            out.append(scale.tobytes() + codes.astype(np.int8).tobytes())
            meant.append([float(scale) * int(c) for c in codes])
            continue
        offset = np.float16(low if kind == Q4_1 else 0)
        spread = (high - low) / 15 if kind == Q4_1 else max(abs(low), high) / 7
        scale = np.float16(spread or 1)
        shift = 0 if kind == Q4_1 else 8
        steps = np.rint((block - np.float32(offset)) / np.float32(scale))
        codes = np.clip(steps + shift, 0, 15).astype(np.uint8)
        packed = bytes(int(codes[i]) | int(codes[i + 16]) << 4 for i in range(16))
        middle = offset.tobytes() if kind == Q4_1 else b""
        out.append(scale.tobytes() + middle + packed)
        meant.append([float(scale) * (int(c) - shift) + float(offset) for c in codes])
    return b"".join(out), np.asarray(meant, np.float32).reshape(values.shape)


def permute(rows, heads):
    """llama.cpp's conversion of query and key rows."""
    out, width = rows.shape
    split = rows.reshape(heads, 2, out // heads // 2, width)
    return split.swapaxes(1, 2).reshape(out, width)


def metadata():
    return {
        "general.architecture": "llama",
        "general.alignment": 32,
        "llama.block_count": LAYERS,
        "llama.context_length": 128,
        "llama.embedding_length": WIDTH,
        "llama.feed_forward_length": FFN,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10000.0,
        "llama.rope.dimension_count": WIDTH // HEADS,
        "llama.vocab_size": len(TOKENS),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [3, 1, 1, 1, 3, 1],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": 0,
        "a.flag": True,
    }


def tensors():
    """GGUF name -> (values, kind)."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    kv = WIDTH // HEADS * KV_HEADS
    found = {
        "token_embd.weight": (draw(len(TOKENS), WIDTH), Q8_0),
        "output_norm.weight": (draw(WIDTH), F32),
    }
    for layer in range(LAYERS):
        for name, shape, kind in (
            ("attn_norm", (WIDTH,), F32),
            ("attn_q", (WIDTH, WIDTH), Q4_1),
            ("attn_k", (kv, WIDTH), Q4_0),
            ("attn_v", (kv, WIDTH), Q8_0),
            ("attn_output", (WIDTH, WIDTH), F16),
            ("ffn_norm", (WIDTH,), F32),
            ("ffn_gate", (FFN, WIDTH), Q4_1),
            ("ffn_up", (FFN, WIDTH), BF16),
            ("ffn_down", (WIDTH, FFN), Q4_0),
        ):
            found[f"blk.{layer}.{name}.weight"] = (draw(*shape), kind)
    return found


def build(path, meta=None, items=None, *, offsets=None, dims=None, kinds=None, cut=0):
    """Writes a file; returns the values that its tensors mean."""
    meta = metadata() if meta is None else meta
    items = tensors() if items is None else items
    table, data, meant = b"", b"", {}
    for name, (values, kind) in items.items():
        stored, meant[name] = quantise(values, kind)
        shape = (dims or {}).get(name, values.shape[::-1])
        offset = (offsets or {}).get(name, len(data))
        table += string(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
        table += struct.pack("<IQ", (kinds or {}).get(name, kind), offset)
        data += stored + b"\0" * (-len(stored) % 32)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(items), len(meta))
    head += b"".join(string(key) + value(item) for key, item in meta.items()) + table
    content = head + b"\0" * (-len(head) % 32) + data
    path.write_bytes(content[: len(content) - cut])
    return meant


@pytest.fixture(scope="session")
def gguf_writer():
    """`build`, and the parts that tests change."""
    return types.SimpleNamespace(
        build=build,
        metadata=metadata,
        tensors=tensors,
        quantise=quantise,
        permute=permute,
        string=string,
        value=value,
    )


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.gguf"
