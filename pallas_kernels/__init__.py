"""Kernels for the hot operations, a folder an op; imports JAX only."""
