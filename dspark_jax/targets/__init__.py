"""Target models: the decoder family, loaders and the tokenizer."""
