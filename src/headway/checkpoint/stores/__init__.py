"""Checkpoints in object stores: committed by one conditional request, and read in the ranges that a rank needs."""
