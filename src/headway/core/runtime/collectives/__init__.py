"""Collectives with a handshake that checks that all ranks call the same operation, and helpers for nested batches."""
