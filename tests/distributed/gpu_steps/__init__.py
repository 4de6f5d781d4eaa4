"""Benchmark steps for the test of `python -m benchmarks.gpu`. They fail, hang or succeed, and measure nothing."""
