"""Checkpoints of an Accelerator: what is saved, when it is taken up, and the methods that do it."""
