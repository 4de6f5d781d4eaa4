"""Checkpoints: saving, loading and resuming the state of a run, on disks and in object stores."""
