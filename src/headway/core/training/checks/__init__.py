"""Checks during training that every run makes, such as misuse of the API, diverging replicas and non-finite values.

Checks that only some runs make are in `headway.extras`, and are appended to the lists of `StepHooks`.
"""
