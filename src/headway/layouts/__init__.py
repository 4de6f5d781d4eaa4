"""Layouts beyond data parallelism: tensor, expert, context and pipeline parallelism, and DeepSpeed's engine."""
