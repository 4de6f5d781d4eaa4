"""Checks while a run trains: misuse of the API, diverging replicas, non-finite values, spikes, and schedule lengths."""
