"""Lossless decoding: prefill, the speculative round, and generation loops."""
