"""Attention of draft blocks and verified rows over a dense or paged cache."""

from pallas_kernels.cached_attention.api import (
    block_attention,
    fastest,
    verify_attention,
)

__all__ = ["block_attention", "fastest", "verify_attention"]
