"""Strategies, which replicate or shard a model over ranks: one file or folder per strategy, behind one protocol."""
