"""What the parts of `mosaic_gpu` share: sizes of a launch, and a worker's unit."""

from typing import NamedTuple

import jax

ROWS = 64  # of a wgmma
PIECE = 128  # columns of an accumulator: two of them fit the registers
# Below all scores, and finite: -inf - FLOOR is -inf, whose exp2 is 0, and not NaN.
FLOOR = -3e38


class Shape(NamedTuple):
    """What a launch is compiled for, beside its settings."""

    total_rows: int  # T
    kv_heads: int  # G
    group: int  # query heads a kv head
    pieces: int  # of the head width
    piece: int  # columns of one
    key_rows: int  # positions a row of the cache, or a page, holds
    rows: int  # rows of a run, or of a tile if that is less
    copies: int  # TMA copies a tile of keys takes
    paged: bool
    pages: int  # a request can have at most
    has_padding: bool  # rows of the query may be of no run


class Unit(NamedTuple):
    """A tile of rows and a kv head, and what of its keys this worker reads."""

    run: jax.Array  # the tile of rows
    head: jax.Array
    first: jax.Array  # of the unit's tiles of keys
    end: jax.Array
    part: jax.Array
    is_whole: jax.Array
    first_row: jax.Array
    num_rows: jax.Array
    slot: jax.Array
    first_key: jax.Array
    end_key: jax.Array
    first_tile: jax.Array
