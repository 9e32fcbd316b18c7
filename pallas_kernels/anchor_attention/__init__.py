"""Attention of many draft blocks a sequence, for training."""

from pallas_kernels.anchor_attention.api import anchor_attention

__all__ = ["anchor_attention"]
