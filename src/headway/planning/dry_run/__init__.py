"""Dry runs for plans and forecasts: run one rank of any layout in this process, on tensors without values."""
