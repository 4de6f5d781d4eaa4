"""Automatic micro-batching: a batch runs in micro-batches, which become smaller if memory runs out."""
