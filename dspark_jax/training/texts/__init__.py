"""Where training texts come from: written by the target, read from files, batched."""
