"""Decide where a model's parts are placed: build it without memory, measure its sizes, and solve for the budgets."""
