"""Prepared data loaders: order of samples, shard of each rank, padding masks, and positions that can be saved."""
