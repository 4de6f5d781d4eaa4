"""Small helpers that every layer may use: the environment, files, tracebacks, units, and what comes from outside."""
