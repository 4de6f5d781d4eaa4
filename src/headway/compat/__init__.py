"""Compatibility with other libraries: Accelerate's public names, and advice on the names of others."""

from headway.compat.accelerate.provided_names.finder import install_as_accelerate as install_as_accelerate

__all__ = ["install_as_accelerate"]
