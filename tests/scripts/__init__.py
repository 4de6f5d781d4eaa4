"""Scripts like those that people publish for Accelerate.

`tests/distributed/test_public_scripts.py` runs them with both libraries.
"""
