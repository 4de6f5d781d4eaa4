"""Lookup of names in the package `accelerate` when Headway replaces Accelerate.

This module is separate from `names.py`, because it imports `headway`, and `headway` imports `names.py`.
"""

from functools import cache
from typing import Any, NoReturn

import headway
from headway.common.named_imports import import_attribute
from headway.compat.accelerate.provided_names.advice import explain_name
from headway.compat.accelerate.provided_names.tables import AS_ACCELERATE
from headway.errors import NotServed


def find_as_accelerate(name: str) -> Any:
    """Return the object `accelerate.NAME` when Headway replaces Accelerate.

    For a name of Accelerate that Headway does not provide, return a placeholder that raises NotServed when it is used.

    Raises:
        AttributeError: If neither Accelerate nor Headway has the name.
        ImportFailed: If Headway provides the name, but its module cannot be imported.
    """
    if name in AS_ACCELERATE:
        module_name, attribute = AS_ACCELERATE[name]
        return import_attribute(module_name, attribute)
    try:
        return getattr(headway, name)
    except AttributeError as error:
        sentence = explain_name(name)
        if sentence is not None:
            return make_placeholder(name, sentence)  # so that a script that only imports the name still runs
        raise AttributeError(f"module 'accelerate', served by Headway, has no attribute {name!r}", name=name) from error


_FUNCTIONS = ("GatheredParameters",)
"""Accelerate's functions whose names begin with a capital letter, like those of classes."""


class NotServedType(type):
    """Metaclass of placeholders for classes of Accelerate that Headway does not provide.

    Scripts can import the placeholders. Calling or subclassing one raises `NotServed`.
    """

    def __call__(cls, *args: object, **kwargs: object) -> NoReturn:
        """Raise an error that names an alternative to the class.

        Raises:
            NotServed: Always.
        """
        raise NotServed(cls.__doc__ or cls.__name__)


@cache
def make_placeholder(name: str, sentence: str) -> Any:
    """Return a placeholder for a name that Headway does not provide. Equal arguments return the same object.

    The placeholder is a function if Accelerate's object is a function, else a class.

    Args:
        name: Name in Accelerate.
        sentence: Message of the error that the placeholder raises.
    """
    if name[:1].isupper() and name not in _FUNCTIONS:
        return NotServedType(name, (), {"__doc__": sentence, "__module__": "accelerate"})

    def raise_not_served(*args: object, **kwargs: object) -> NoReturn:
        raise NotServed(sentence)

    raise_not_served.__name__ = raise_not_served.__qualname__ = name
    raise_not_served.__doc__, raise_not_served.__module__ = sentence, "accelerate"
    return raise_not_served
