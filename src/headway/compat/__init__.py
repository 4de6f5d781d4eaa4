"""Compatibility with other libraries: their public names, implemented by Headway."""

from headway.compat.accelerate.served.finder import install_as_accelerate as install_as_accelerate

__all__ = ["install_as_accelerate"]
