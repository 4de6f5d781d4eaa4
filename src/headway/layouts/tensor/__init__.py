"""Tensor, sequence and expert parallelism: matrices and experts split across the ranks of one mesh axis."""
