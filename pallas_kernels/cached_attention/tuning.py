"""Settings of each kernel, and the measured table that chooses them by shape."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class MosaicGpuConfig:
    """Settings of the Mosaic GPU kernel.

    Attributes:
      max_parts: into how many parts a unit (tile of rows, kv head) may be cut; 1 =
        whole units, written without a combine.
      key_tile: keys a tile, a multiple of 64.
      stages: tiles in flight.
      workers: blocks launched, one a multiprocessor.
      warpgroups: that multiply, 1 or 2. Two hide one's softmax behind the other's
        products; they need an even number of stages.
    """

    max_parts: int = 1
    key_tile: int = 64
    stages: int = 4
    workers: int = 132
    warpgroups: int = 1

    def __post_init__(self) -> None:
        if self.key_tile < 64 or self.key_tile % 64:
            raise ValueError(
                f"`key_tile` must be a positive multiple of 64, got {self.key_tile}"
            )
        if self.warpgroups not in (1, 2):
            raise ValueError(f"`warpgroups` must be 1 or 2, got {self.warpgroups}")
        for name in ("max_parts", "stages", "workers"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"`{name}` must be at least 1, got {getattr(self, name)}"
                )


@dataclasses.dataclass(frozen=True)
class MosaicTpuConfig:
    """Settings of the TPU kernel.

    Attributes:
      key_tile: keys a block of a dense cache; a paged cache is read by pages.
      max_rows: folded query rows a block at most (one token's heads at least).
    """

    key_tile: int = 512
    max_rows: int = 128

    def __post_init__(self) -> None:
        if self.key_tile < 128 or self.key_tile % 128:
            raise ValueError(
                f"`key_tile` must be a positive multiple of 128, got {self.key_tile}"
            )
        if self.max_rows < 1:
            raise ValueError(f"`max_rows` must be at least 1, got {self.max_rows}")


@dataclasses.dataclass(frozen=True)
class TritonConfig:
    """Settings of the Triton kernel.

    Attributes:
      num_parts: parts of the context that are read side by side; 1 = no combine.
      key_tile: keys a step, a power of two.
      num_warps, num_stages: as Triton has them.
    """

    num_parts: int = 1
    key_tile: int = 64
    num_warps: int = 4
    num_stages: int = 3


@dataclasses.dataclass(frozen=True)
class Measured:
    """One line of the table: for which shapes what was best, where and when.

    Attributes:
      min_units: holds from this number of units (tiles of rows times kv heads) on.
      max_capacity: and up to this number of keys that a request can have.
      max_parts: the setting; None = as many as give every multiprocessor its share.
      max_units: holds up to this number of units.
      width: holds for heads of this width; None = for all.
      warpgroups: the setting, with heads of up to 128.
      stages: the setting; None = that of `STAGES`.
    """

    device: str
    date: str
    min_units: int
    max_capacity: int
    max_parts: int | None
    max_units: int = 2**30
    width: int | None = None
    warpgroups: int = 2
    stages: int | None = None


# The first line that holds is taken; what a sweep of `pallas_kernels.bench` finds
# better goes here, with its date. Where units are few a multiprocessor reads little,
# and the start of a block counts: the more threads and shared memory, the longer it
# takes. By one warpgroup with 2 stages and by two with 4, in us: 1 x 2,048 keys 11.0
# and 11.8, 1 x 8,192 17.4 and 18.6, 8 x 1,024 17.2 and 18.2, 8 x 2,048 26.5 and 27.3,
# 8 x 8,192 71.9 and 72.9.
TABLE = (
    Measured("NVIDIA H200", "2026-11-29", 1, 64, max_parts=1),
    Measured("NVIDIA H200", "2026-11-29", 264, 2048, max_parts=1),
    Measured("NVIDIA H200", "2026-11-29", 264, 2**30, max_parts=2),
    Measured(
        "NVIDIA H200",
        "2026-11-30",
        min_units=1,
        max_capacity=2**30,
        max_parts=None,
        max_units=64,
        width=128,
        warpgroups=1,
        stages=2,
    ),
    Measured("NVIDIA H200", "2026-11-29", 1, 2**30, max_parts=None),
)
# Against XLA, inside a pass of 36 layers (NVIDIA H200, 2026-11-30, dense, 32 query and
# 8 kv heads of width 128), ms by XLA and by the kernel, for windows of 8 rows: over
# 2 MiB of keys and values a layer 3.68 and 3.42, 8 MiB 4.31 and 3.50, 32 MiB 4.65 and
# 4.05, 16 MiB of 8 requests 4.40 and 4.09, 64 MiB 5.70 and 4.55; 128 MiB of 64 requests
# 11.5 and 9.9, 512 MiB 20.5 and 12.9. For single rows, in this order, 3.80 and 3.73,
# 3.87 and 3.76, 4.81 and 4.35, 3.71 and 3.63, 4.24 and 4.04, 5.55 and 5.16, 8.98 and
# 8.10. Less was not timed.
FASTER_FROM_BYTES = 2 * 2**20
FASTER_UP_TO_ROWS = 64
# By head width: what shared memory holds beside the query and the output.
STAGES = {64: 6, 128: 4, 256: 1}
MOST_PARTS = 34  # all of them are asked for at once when they are joined


def mosaic_gpu(
    units: int, capacity: int, width: int, *, multiprocessors: int = 132
) -> MosaicGpuConfig:
    """The setting for a shape class.

    Args:
      units: tiles of query rows times kv heads.
      capacity: keys that a request can have at most.
      width: head width.
      multiprocessors: of the device.
    """
    line = next(
        line
        for line in TABLE
        if line.min_units <= units <= line.max_units
        and capacity <= line.max_capacity
        and line.width in (None, width)
    )
    max_parts, workers = line.max_parts, multiprocessors
    if max_parts is None:
        # As many for each unit, if few are left over: equal lengths are then cut at
        # their own ends. 8 requests of 8,192 keys 76.5 us, with all 132 at work 81.8;
        # one 20.8 and 22.2 (NVIDIA H200, 2026-11-30).
        even = workers // units * units
        workers = even if 16 * even >= 15 * workers else workers
        # A unit of the mean length, cut at two places that are not its own ends.
        max_parts = min(-(-workers // units) + 2, MOST_PARTS)
    return MosaicGpuConfig(
        max_parts=max_parts,
        stages=STAGES[width] if line.stages is None else line.stages,
        workers=workers,
        warpgroups=line.warpgroups if width <= 128 else 1,
    )


def mosaic_gpu_is_faster(*, num_bytes: int, folded_rows: int) -> bool:
    """Whether the Mosaic GPU kernel was measured faster than XLA.

    Args:
      num_bytes: of the keys and values that requests can have at most.
      folded_rows: rows of a window times query heads a kv head.
    """
    return num_bytes >= FASTER_FROM_BYTES and folded_rows <= FASTER_UP_TO_ROWS


# Stages of a float32 kernel by head width: a tile of keys and values is twice as large.
# Three of width 256 want 303 KB of shared memory, a multiprocessor of an H200 has 227.
TRITON_FLOAT32_STAGES = {64: 3, 128: 2, 256: 1}


def triton(units: int, capacity: int, *, width: int, itemsize: int) -> TritonConfig:
    """The setting for a shape class.

    Args:
      units: tiles of query rows times kv heads.
      capacity: keys that a request can have at most.
      width: head width.
      itemsize: bytes of a key's number.
    """
    if units >= 256:
        parts, stages = 1 if capacity <= 2048 else 4, 4
    else:
        parts, stages = max(min(264 // units, capacity // 256), 1), 3
    if itemsize > 2:
        stages = TRITON_FLOAT32_STAGES[width]
    return TritonConfig(num_parts=min(parts, 32), num_stages=stages)
