"""Steps for the test of `python -m benchmarks.gpu`: they fail, hang or succeed, and measure nothing."""
