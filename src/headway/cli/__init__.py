"""The `headway` command, torch-free, but for what it starts on every rank (checks.py)."""
