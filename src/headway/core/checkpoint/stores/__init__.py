"""Stores of checkpoints: folders on a disk, and object stores."""
