"""Checkpoints written: by all ranks together, in the background or not, into folders that one run at a time holds."""
