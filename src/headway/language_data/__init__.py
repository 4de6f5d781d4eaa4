"""Data for language models: weighted mixtures, batches with equal numbers of tokens, packing, conversations, and sharded files."""
