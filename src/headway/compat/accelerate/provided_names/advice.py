"""Error messages for names of Accelerate that Headway does not provide."""

import sys
from collections.abc import Container, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from headway.compat.accelerate.provided_names.tables import MEMBERS, MODULES, NAMES
from headway.errors import ImportNotServed


def explain_name(name: str) -> str | None:
    """Return the error message for a name of Accelerate that Headway does not provide, or None for any other name."""
    advice = NAMES.get(name)
    return None if advice is None else f"headway has no {name!r}: {advice}"


def explain_member(name: str) -> str | None:
    """Return the error message for a member of Accelerate's Accelerator that Headway does not provide.

    Return None for any other name.
    """
    advice = MEMBERS.get(name)
    return None if advice is None else f"Headway's Accelerator has no {name!r}: {advice}"


class ImportAdvisor(MetaPathFinder):
    """Import finder that finds no modules, but raises `ImportNotServed` for names that Headway does not provide.

    The error's message gives advice.

    Args:
        package: Package whose imports it checks: "headway" or "accelerate".
        modules: Modules of the package from which scripts import names, as paths without the package's name.

    Attributes:
        sentences: Error messages by name, for names that Accelerate does not have either.
    """

    def __init__(self, package: str, modules: Container[str]) -> None:
        self.package = package
        self.sentences: dict[str, str] = {}
        self._modules = modules

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return None, so that Python tries the next finder, unless Headway is known not to provide the name.

        Raises:
            ImportNotServed: If Headway does not provide the name and there is advice for it, for example because it is
                a name of Accelerate.
        """
        package, _, name = fullname.partition(".")
        module, _, imported_name = name.rpartition(".")
        if package != self.package or (module and module not in self._modules):
            return None
        sentence = explain_name(imported_name) or self.sentences.get(imported_name)
        if sentence is None:
            return None
        raise ImportNotServed(sentence, name=fullname)


def explain_failed_imports(name: str, sentence: str) -> None:
    """Install an import finder that gives advice if a script imports a name from `headway` that does not exist.

    If `headway` has no attribute of this name, Python looks for a module of this name, and would only report that there
    is none. `__getattr__` cannot raise the ImportError itself, because `hasattr` would then raise it instead of
    returning False. The finder is installed on the first request for a missing name.

    Args:
        name: Name that was requested.
        sentence: Message of the error for this name.
    """
    advisor = next(
        (each for each in sys.meta_path if isinstance(each, ImportAdvisor) and each.package == "headway"), None
    )
    if advisor is None:
        advisor = ImportAdvisor("headway", MODULES)
        sys.meta_path.append(advisor)
    advisor.sentences[name] = sentence
