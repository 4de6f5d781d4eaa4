"""Datasets over sharded files: readers of their formats, an index of their records, and an order with random access."""
