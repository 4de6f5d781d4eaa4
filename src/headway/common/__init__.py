"""Utilities that do not import torch: environment variables, files, tracebacks, units, untrusted input.

Every layer may import them.
"""
