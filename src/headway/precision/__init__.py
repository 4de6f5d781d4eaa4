"""Number formats of a training step: plain, bf16, fp16, float8."""
