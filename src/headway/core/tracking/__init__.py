"""Experiment tracking: the run log, trackers that receive its values, progress bars, and reports."""
