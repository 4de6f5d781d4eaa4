"""Other libraries' names, served by Headway's own parts."""

from headway.compat.accelerate.served.names import install_as_accelerate as install_as_accelerate

__all__ = ["install_as_accelerate"]
