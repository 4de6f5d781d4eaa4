"""Mixed precision: full precision, bf16, fp16 and float8."""
