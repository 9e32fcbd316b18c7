"""The Triton source of `triton.attend`; importing it needs triton."""

import triton
import triton.language as tl


@triton.jit
def kernel(
    query,
    keys,
    values,
    table,
    spans,
    limits,
    outs,
    sums,
    total: tl.constexpr,
    count: tl.constexpr,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    width: tl.constexpr,
    rows: tl.constexpr,
    key_tile: tl.constexpr,
    key_rows: tl.constexpr,
    pages: tl.constexpr,
    parts: tl.constexpr,
    paged: tl.constexpr,
    window: tl.constexpr,
    to_log2: tl.constexpr,
    precise: tl.constexpr,
):
    """One part of the keys of one tile of rows and one kv head."""
    run = tl.program_id(0)
    head = tl.program_id(1)
    part = tl.program_id(2)
    first_row = tl.load(spans + run)
    num_rows = tl.load(spans + count + run)
    slot = tl.load(spans + 2 * count + run)
    first_key = tl.load(spans + 3 * count + run)
    end_key = tl.load(spans + 4 * count + run)
    first_tile = tl.load(spans + 5 * count + run)
    num_tiles = tl.load(spans + 6 * count + run)
    share = tl.cdiv(num_tiles, parts)
    first = first_tile + part * share
    end = tl.minimum(first + share, first_tile + num_tiles)

    row = tl.arange(0, rows)
    column = tl.arange(0, width)
    key = tl.arange(0, key_tile)
    token = first_row + row // group
    is_row = (row // group < num_rows) & (row < rows // group * group)
    place = (token * kv_heads + head) * group + row % group  # in [T * H]
    at = place.to(tl.int64)[:, None] * width + column[None]
    q = tl.load(query + at, mask=is_row[:, None], other=0.0)
    limit = tl.load(limits + run * rows + row)
    largest = tl.full([rows], -3e38, tl.float32)
    denominator = tl.zeros([rows], tl.float32)
    acc = tl.zeros([rows, width], tl.float32)
    for tile in range(first, end):
        position = tile * key_tile + key
        read = (position >= first_key) & (position < end_key)
        if paged:
            entry = tl.minimum(position // key_rows, pages - 1)
            page = tl.load(table + slot * pages + entry, mask=read, other=0)
            start = (page.to(tl.int64) * kv_heads + head) * key_rows
            place_of = start + position % key_rows
        else:
            start = (slot.to(tl.int64) * kv_heads + head) * key_rows
            place_of = start + position
        source = place_of[:, None] * width + column[None]
        k = tl.load(keys + source, mask=read[:, None], other=0.0)
        if precise:
            score = tl.dot(q, tl.trans(k), input_precision="ieee")
        else:
            score = tl.dot(q, tl.trans(k))
        visible = position[None] < limit[:, None]
        if window > 0:
            visible = visible & (position[None] >= limit[:, None] - window)
        score = tl.where(visible, score * to_log2, float("-inf"))
        new = tl.maximum(largest, tl.max(score, 1))
        decay = tl.exp2(largest - new)
        weight = tl.exp2(score - new[:, None])
        denominator = denominator * decay + tl.sum(weight, 1)
        v = tl.load(values + source, mask=read[:, None], other=0.0)
        acc = acc * decay[:, None]
        if precise:
            acc = tl.dot(weight, v, acc, input_precision="ieee")
        else:
            acc = tl.dot(weight.to(v.dtype), v, acc)
        largest = new
    acc = acc / tl.where(denominator > 0, denominator, 1.0)[:, None]
    if parts == 1:
        tl.store(outs + at, acc.to(outs.dtype.element_ty), mask=is_row[:, None])
    else:
        start = part.to(tl.int64) * total * kv_heads * group * width
        tl.store(outs + start + at, acc, mask=is_row[:, None])
        log = tl.where(denominator > 0, largest + tl.log2(denominator), float("-inf"))
        tl.store(sums + ((part * count + run) * kv_heads + head) * rows + row, log)
