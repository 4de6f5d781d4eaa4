"""Accelerate's module paths under Headway's name: `from headway.utils import set_seed` finds what `headway` itself has.

A finder at the end of `sys.meta_path` is asked only for what nobody else found, so other imports pay nothing. It makes
a module without a file, whose names are looked up in `headway`; and for `from headway import X` with a name of
Accelerate's that is not served it raises NotServed, an ImportError with the sentence that says what to use.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from headway.errors import NotServed
from headway.familiar.names import MODULES, RENAMED, SERVED

_PACKAGE = "headway"


class FamiliarModule(ModuleType):
    """A module of Accelerate's, as a view of `headway`."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        inner = f"{self.__name__}.{name}"
        if inner.removeprefix(f"{_PACKAGE}.") in MODULES and name not in SERVED:
            return import_module(inner)
        return getattr(sys.modules[_PACKAGE], name)

    def __setattr__(self, name: str, value: Any) -> None:
        # The import system hangs `headway.utils.tqdm` into `headway.utils`, where `tqdm` is a function.
        if not (isinstance(value, FamiliarModule) and name in SERVED):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return dir(sys.modules[_PACKAGE])


class FamiliarFinder(MetaPathFinder, Loader):
    """Finds the modules of `MODULES`, and speaks where a name is asked for that is not served."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module's spec; None for what is not Headway's.

        Raises:
            NotServed: a name of Accelerate's that is not served.
        """
        package, _, name = fullname.partition(".")
        if package != _PACKAGE:
            return None
        if name in MODULES:
            return ModuleSpec(fullname, self, is_package=any(other.startswith(f"{name}.") for other in MODULES))
        from headway.familiar.not_served import advice

        # `from headway.utils import X` asks for headway.utils.X, `from headway import X` for headway.X.
        owner, _, last = name.rpartition(".")
        sentence = advice(last) if not owner or owner in MODULES else None
        if sentence is None:
            return None
        raise NotServed(sentence, name=fullname)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """An empty module, filled as it is asked."""
        return FamiliarModule(spec.name, f"Accelerate's `{spec.name.removeprefix(f'{_PACKAGE}.')}`, served by Headway.")

    def exec_module(self, module: ModuleType) -> None:
        """Nothing runs: names are looked up on use. Without a path of its own it is asked name by name."""
        module.__path__ = []


def install() -> None:
    """Add the finder, once a process."""
    if not any(type(finder).__name__ == FamiliarFinder.__name__ for finder in sys.meta_path):
        sys.meta_path.append(FamiliarFinder())


def find(name: str) -> Any:
    """What Accelerate calls `name`.

    Raises:
        AttributeError: it is not served; the message says what to use.
    """
    if name in SERVED:
        return getattr(import_module(SERVED[name]), name)
    if name in RENAMED:
        place, own = RENAMED[name]
        return getattr(import_module(place), own)
    if name in MODULES:
        return import_module(f"{_PACKAGE}.{name}")
    from headway.familiar.not_served import advice

    raise AttributeError(advice(name) or f"module {_PACKAGE!r} has no name {name!r}")
