"""Accelerate's checkpoint folders and files of shards."""
