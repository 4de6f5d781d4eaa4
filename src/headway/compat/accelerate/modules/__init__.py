"""Accelerate's functions and hooks for modules and models."""
