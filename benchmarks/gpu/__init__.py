"""Benchmarks and tests that need an accelerator, all in one command: `make gpu`, or `python -m benchmarks.gpu`."""
