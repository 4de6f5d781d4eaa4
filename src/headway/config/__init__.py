"""Typed settings and where each one came from; torch-free."""
