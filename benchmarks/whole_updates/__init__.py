"""Benchmark of optimizers that update whole matrices on sharded models."""
