"""Target models: the decoder family, loaders and the tokenizer."""

DEFAULT_TARGET = "smollm2-135m"
