"""Packages that only some features need: imported on use, and named with their install line where missing."""

import importlib
import importlib.util
from functools import cache
from types import ModuleType
from typing import Any

from headway.errors import OptionalDependencyMissing


@cache
def available(package: str) -> bool:
    """Can `package` be imported here? Asks the import system without importing."""
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False


def require(package: str, purpose: str, install: str) -> ModuleType:
    """Import `package` and return it.

    Args:
        package: the import name.
        purpose: what needs it, for the error: "stateful loaders need".
        install: what pip installs it by.

    Raises:
        OptionalDependencyMissing: it is not installed; the message has the install line.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise OptionalDependencyMissing(
            f"{purpose} {package}, which is not installed: pip install '{install}'"
        ) from error


class Later:
    """A module that is imported when something of it is first asked for: what an Accelerator alone does not need.

    Args:
        name: as for `import`.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        """The module's own."""
        return getattr(importlib.import_module(self._name), attribute)
