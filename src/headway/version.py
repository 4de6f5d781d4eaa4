"""Version of Headway, which the package's metadata and all modules read from here.

It is the year and month of the release and a number within the month. Scripts written for Accelerate check that the
version is at least 0.16.0, for example, before they register their hooks. A year passes every such check, and claims
nothing about the maturity of the library. This file is separate from the package's `__init__.py`, so that every
layer may import it.
"""

__version__ = "2026.12.0"
