"""Scripts as people publish them for Accelerate; `tests/distributed/test_public_scripts.py` runs them with either library."""
