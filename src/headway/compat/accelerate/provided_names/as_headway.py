"""Lookup of Accelerate's names in `headway`, for scripts whose imports were changed from `accelerate` to `headway`."""

from collections.abc import Iterable
from typing import Any

from headway.common.named_imports import import_attribute
from headway.compat import other_library_names
from headway.compat.accelerate.provided_names.advice import explain_failed_imports, explain_name
from headway.compat.accelerate.provided_names.tables import MODULES, PROVIDED, RENAMED
from headway.core.config.values import suggest_word


def find_provided_name(name: str, public_names: Iterable[str] = ()) -> Any:
    """Return Headway's object for a name of Accelerate.

    Args:
        name: Name of Accelerate that is not a public name of `headway`.
        public_names: Public names of `headway`. If `name` is similar to one of them, the error message suggests it.

    Raises:
        AttributeError: If Headway does not provide the name. The message names an alternative or a similar name.
        ImportFailed: If Headway provides the name, but its module cannot be imported.
    """
    if name in PROVIDED:
        return import_attribute(PROVIDED[name], name)
    if name in RENAMED:
        module_name, attribute = RENAMED[name]
        return import_attribute(module_name, attribute)
    if name in MODULES:
        return import_attribute(f"headway.{name}")
    sentence = explain_name(name) or _advise_on_unknown_name(name, public_names)
    if sentence is not None:
        explain_failed_imports(name, sentence)
    if sentence is None or "did you mean" in sentence:  # Python itself adds its suggestion to an AttributeError
        raise AttributeError(f"module 'headway' has no name {name!r}")
    raise AttributeError(sentence)


def _advise_on_unknown_name(name: str, public_names: Iterable[str]) -> str | None:
    """Return an error message with advice for a misspelled name or a name of another library, else None."""
    if name.startswith("_"):
        return None
    if name in other_library_names.NAMES:
        return f"headway has no {name!r}: {other_library_names.NAMES[name]}"
    hint = suggest_word(name, [*public_names, *PROVIDED])
    return f"headway has no {name!r}{hint}" if hint else None
