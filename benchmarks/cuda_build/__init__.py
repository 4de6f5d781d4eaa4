"""Benchmarks that run torch's CUDA build on the simulated runtime; each prints a table."""
