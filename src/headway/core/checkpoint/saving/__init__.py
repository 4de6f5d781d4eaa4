"""Saving checkpoints on all ranks together, blocking or in the background, with a lock against other runs."""
