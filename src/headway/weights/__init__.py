"""Weights on disk: safetensors files written and read as streams, checkpoints found and their names settled."""
