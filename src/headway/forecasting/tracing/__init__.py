"""Trace one training step on fake tensors, and record every allocation that it makes."""
