"""Compatibility with Accelerate: the names that scripts import from Accelerate, implemented by Headway."""
