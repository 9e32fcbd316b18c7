"""A training run: its configuration, folder, loop, records, and what can go wrong."""
