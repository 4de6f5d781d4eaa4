"""Checks before a run: this machine, what its processes can send one another, and the library itself."""
