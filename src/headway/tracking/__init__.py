"""A run's log, and the trackers that are fed from it."""
