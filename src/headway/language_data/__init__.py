"""Data for language models: mixtures of sources, batches by tokens, packing, and sharded files."""
