"""Attention of many draft blocks a sequence, for training."""

from pallas_kernels.anchor_attention.api import (
    PREFERRED,
    anchor_attention,
    supports,
    unavailable,
)

__all__ = ["PREFERRED", "anchor_attention", "supports", "unavailable"]
