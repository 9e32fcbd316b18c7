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
