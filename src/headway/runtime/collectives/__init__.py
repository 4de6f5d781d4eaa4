"""Nested batches, and checked collectives."""
