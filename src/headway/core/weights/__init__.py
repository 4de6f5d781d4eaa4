"""Weights on disk: streaming reads and writes of safetensors files, discovery of checkpoints, and mapping of names."""
