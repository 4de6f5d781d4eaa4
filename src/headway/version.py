"""Headway's version: the one place that says it.

It is the year and month of the release and a number within the month. Scripts written for Accelerate ask whether the
version is at least 0.16.0, for example, before they register their hooks; a year is above every such gate, and claims nothing
about how mature the library is. Kept apart from the package's own module, so that every layer may read it.
"""

__version__ = "2026.11.0"
