"""Import of an object by the names of its module and itself, for the function `__getattr__` of a module."""

from importlib import import_module
from typing import Any


def import_attribute(module_name: str, attribute: str | None = None) -> Any:
    """Import a module, and return one of its attributes.

    Args:
        module_name: Full name of the module.
        attribute: Name of the attribute. None (the default): the module itself is returned.

    Raises:
        ImportFailed: If the import ends with an `AttributeError`, such as with another version of torch. Python takes an
            `AttributeError` of a module's `__getattr__` to mean that there is no such name, and hides its cause.
    """
    try:
        module = import_module(module_name)
        return module if attribute is None else getattr(module, attribute)
    except AttributeError as error:
        # Not imported above, because `headway.errors` imports `json`, and a launched script may have a file `json.py`.
        from headway.errors import ImportFailed

        name = module_name if attribute is None else f"{module_name}.{attribute}"
        raise ImportFailed(
            f"{name} cannot be imported: {error}. Check that the installed torch version is one that Headway supports"
        ) from error
