"""Version of Headway, which the package's metadata and all modules read from here.

The version consists of the release's year, its month, and its number within the month. Scripts written for Accelerate
compare versions: for example, they register hooks only if the version is at least 0.16.0. A year passes every such
check, and claims nothing about the maturity of the library. This file is separate from the package's `__init__.py`, so
that every layer may import it.
"""

__version__ = "2026.12.0"
