"""Lookup of Accelerate's names in `headway`, for scripts whose imports were changed from `accelerate` to `headway`."""

from collections.abc import Iterable
from importlib import import_module
from typing import Any

from headway.compat import foreign_words
from headway.compat.accelerate.served.advice import explain_failed_imports, explain_name
from headway.compat.accelerate.served.tables import MODULES, RENAMED, SERVED
from headway.core.config.values import suggest_word


def find_served_name(name: str, public_names: Iterable[str] = ()) -> Any:
    """Return Headway's object for a name of Accelerate.

    Args:
        name: Name of Accelerate that is not a public name of `headway`.
        public_names: Public names of `headway`. If `name` is similar to one of them, the error message suggests it.

    Raises:
        AttributeError: If Headway does not provide the name. The message names an alternative or a similar name.
    """
    if name in SERVED:
        return getattr(import_module(SERVED[name]), name)
    if name in RENAMED:
        module_name, attribute = RENAMED[name]
        return getattr(import_module(module_name), attribute)
    if name in MODULES:
        return import_module(f"headway.{name}")
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
    if name in foreign_words.NAMES:
        return f"headway has no {name!r}: {foreign_words.NAMES[name]}"
    hint = suggest_word(name, [*public_names, *SERVED])
    return f"headway has no {name!r}{hint}" if hint else None
