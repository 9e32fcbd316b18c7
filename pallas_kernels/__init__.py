"""Kernels for the hot operations, a folder an op; nothing imports them yet."""
