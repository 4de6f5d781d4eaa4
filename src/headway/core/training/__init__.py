"""Training: the step, accumulation windows, and the objects that `prepare()` returns."""
