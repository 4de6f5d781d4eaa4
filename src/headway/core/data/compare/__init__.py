"""Detect that ranks were given different data, by comparing fingerprints of a few samples."""
