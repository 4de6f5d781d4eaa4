"""Saving and resuming the state of a run: which state a checkpoint contains, and how a resumed run continues."""
