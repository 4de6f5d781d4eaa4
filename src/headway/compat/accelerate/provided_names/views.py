"""Attribute access for modules such as `headway.utils`, for scripts whose imports changed from Accelerate to Headway.

The folder `headway/compat/accelerate/module_paths` contains a small file for each of these modules. The folder is part
of the search path of the package `headway`, so Python finds the modules like any others.
"""

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from headway.compat.accelerate.provided_names.tables import MODULES


def make_module_attributes(name: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the functions `__getattr__` and `__dir__` for a module that provides all names of the package `headway`.

    `__all__` lists the public names. If the module has no `__path__`, it is set to [].

    Args:
        name: Full name of the module, such as "headway.utils".
    """
    # With a `__path__`, Python looks for a module if an imported name is missing, as `explain_failed_imports` requires.
    vars(sys.modules[name]).setdefault("__path__", [])
    path = name.partition(".")[2]

    def read_name(attribute: str) -> Any:
        if attribute == "__all__":
            return [each for each in list_names() if not each.startswith("_")]
        if attribute.startswith("__"):
            raise AttributeError(f"module {name!r} has no attribute {attribute!r}")
        if f"{path}.{attribute}" in MODULES:
            return import_module(f"{name}.{attribute}")
        return getattr(sys.modules["headway"], attribute)

    def list_names() -> list[str]:
        return dir(sys.modules["headway"])

    return read_name, list_names
