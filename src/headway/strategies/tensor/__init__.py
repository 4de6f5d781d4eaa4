"""Tensor and sequence parallelism: matrices split across the ranks of one axis."""
