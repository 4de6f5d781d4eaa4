"""Nested batches, and the one door for collectives."""
