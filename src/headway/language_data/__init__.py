"""Data for language models: weighted mixtures, batches with equal numbers of tokens, packing, and sharded files."""
