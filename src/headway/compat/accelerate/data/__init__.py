"""Batches, loaders and exchange as Accelerate's functions."""
