"""Checkpoint dialects of other systems: one a file, both ways."""
