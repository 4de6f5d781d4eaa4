"""Optional packages: imported on first use, with an install command in the error if one is missing."""

import importlib
import importlib.util
from functools import cache
from types import ModuleType
from typing import Any

from headway.errors import OptionalDependencyMissing


@cache
def is_available(package: str) -> bool:
    """Whether `package` can be imported. Does not import it."""
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False


def require(package: str, purpose: str, install: str) -> ModuleType:
    """Import `package` and return it.

    Args:
        package: Import name of the package.
        purpose: Start of the error message, which names the feature that needs the package: "stateful loaders need".
        install: Requirement to pass to `pip install`.

    Raises:
        OptionalDependencyMissing: If the package cannot be imported. The message contains the install command.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise OptionalDependencyMissing(
            f"{purpose} {package}, which is not installed: pip install '{install}'"
        ) from error


class LazyModule:
    """Proxy for a module that is imported when one of its attributes is first read.

    Used for modules that not every Accelerator needs, to keep the import fast.

    Args:
        name: Dotted name of the module.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        """Import the module on first access, and return one of its attributes."""
        return getattr(importlib.import_module(self._name), attribute)
