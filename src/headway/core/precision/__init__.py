"""Precision of a training step: full precision, or mixed precision with bf16, fp16 or float8."""
