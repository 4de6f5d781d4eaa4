"""Modules and models as Accelerate's functions and hooks handle them."""
