"""Readers of a rank's batches: from a map-style dataset, from an iterable dataset, or by one process for all ranks.

Their common interface is `BatchFeed` in `protocol.py`.
"""
