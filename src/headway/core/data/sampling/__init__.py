"""Sampling: the order of samples, the random numbers that determine it, and the samples that each rank reads."""
