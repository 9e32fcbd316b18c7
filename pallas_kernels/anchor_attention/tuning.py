"""Settings of `anchor_attention`."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class ChunksConfig:
    """How many anchors are taken at a time.

    Attributes:
      anchors: fewer need less memory and, with `cudnn`, fewer scores between blocks in
        vain; more fill the device better.
      skips_context: `cudnn` is told how much of the context a chunk sees.
    """

    anchors: int = 64
    skips_context: bool = True

    def __post_init__(self) -> None:
        if self.anchors < 1:
            raise ValueError(f"`anchors` must be at least 1, got {self.anchors}")


@dataclasses.dataclass(frozen=True)
class MosaicGpuConfig:
    """Settings of the Mosaic GPU kernels.

    Attributes:
      key_tile: keys a tile of the forward pass, a multiple of 64.
      stages: tiles in flight there.
      takes_turns: two warpgroups multiply in turn in the forward pass.
      warpgroups: that multiply, 1 or 2, in the forward pass and for the gradients of
        the rows.
      row_key_tile: keys a tile for the gradients of the rows.
      row_stages: tiles in flight there; at least as many as warpgroups.
      shares_rows: for the gradients of the context, both warpgroups take the same rows
        and each a tile of 64 keys; otherwise both take the same 64 keys and every other
        tile of rows, which is twice the workers.
      context_stages: tiles of rows in flight there, an even number.
    """

    key_tile: int = 128
    stages: int = 2
    takes_turns: bool = True
    warpgroups: int = 2
    row_key_tile: int = 64
    row_stages: int = 3
    shares_rows: bool = False
    context_stages: int = 4

    def __post_init__(self) -> None:
        for name in ("key_tile", "row_key_tile"):
            if getattr(self, name) < 64 or getattr(self, name) % 64:
                raise ValueError(
                    f"`{name}` must be a positive multiple of 64, got "
                    f"{getattr(self, name)}"
                )
        if self.warpgroups not in (1, 2):
            raise ValueError(f"`warpgroups` must be 1 or 2, got {self.warpgroups}")
        if self.stages < 1:
            raise ValueError(f"`stages` must be at least 1, got {self.stages}")
        if self.row_stages < self.warpgroups:
            raise ValueError(
                f"`row_stages` must be at least `warpgroups` = {self.warpgroups}, got "
                f"{self.row_stages}"
            )
        if self.context_stages < 2 or self.context_stages % 2:
            raise ValueError(
                "`context_stages` must be a positive even number, got "
                f"{self.context_stages}"
            )
