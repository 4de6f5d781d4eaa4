"""Evaluation and prediction, what is measured, and the check before the first update."""
