"""Collectives that check in a handshake that all ranks agree, and helpers for nested batches."""
