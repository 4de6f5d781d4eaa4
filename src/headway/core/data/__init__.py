"""Prepared data loaders: sample order, data shards, padding masks, and positions that can be saved and resumed."""
