"""Error of memory forecasts, compared with real runs."""
