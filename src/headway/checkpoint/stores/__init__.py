"""Checkpoints in object stores: committed by one conditional request, and read by the ranges that a rank needs."""
