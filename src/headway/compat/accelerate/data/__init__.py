"""Accelerate's functions and classes for batches, data loaders, samplers and collectives."""
