"""Sharding by torch's fully_shard: setup, all-gathers, gradients, initial values, and checks for misuse by scripts."""
