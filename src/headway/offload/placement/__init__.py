"""Decide where the parts of a model are placed: build it without memory, measure its sizes, and solve for the budgets."""
