"""What the host decides from numbers; nothing here imports more than numpy."""
