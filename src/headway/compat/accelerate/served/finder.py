"""Accelerate's modules as views: `headway.utils` and the like, and `accelerate` itself where Headway stands in for it.

`from headway.utils import set_seed` finds what `headway` has. A finder at the end of `sys.meta_path` is asked only for what
nobody else found, so other imports pay nothing. It makes a module without a file, whose names are looked up in `headway`; and for
`from headway import X` with a name of Accelerate's that is not served it raises NotServed, an ImportError with the sentence that
says what to use. A second one of the kind, at the beginning, does the same for `accelerate` after `take_over`, which a folder at
the front of the path calls: it holds a package `accelerate` of a few lines, and the metadata of a distribution `accelerate`, for
version checks. It takes precedence over the real package, which need not be installed. Nothing here imports torch.
"""

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any

from headway.common import env
from headway.compat.accelerate.served.names import MODULES, MODULES_AS_ACCELERATE, SERVED, find_as_accelerate
from headway.errors import ConfigError, ImportNotServed
from headway.launch.stand_in import FOLDER, VERSION, variables
from headway.version import __version__


class AccelerateModule(ModuleType):
    """A module of Accelerate's, whose names are looked up where Headway has them; what is set on it stays with it.

    Args:
        name: its full name.
        modules: the names of all modules of its package.
        find: gives what a public name stands for.
    """

    def __init__(self, name: str, modules: frozenset[str], find: Callable[[str], Any]) -> None:
        package, _, inner = name.partition(".")
        super().__init__(name, f"Accelerate's `{inner or package}`, served by Headway.")
        self.__dict__["__headway__"] = modules, find

    def __getattr__(self, name: str) -> Any:
        if name == "__all__":
            return dir(self)
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        modules, find = self.__dict__["__headway__"]
        inner = f"{self.__name__}.{name}".partition(".")[2]
        if inner in modules and name not in SERVED:
            return import_module(f"{self.__name__}.{name}")
        return find(name)

    def __setattr__(self, name: str, value: object) -> None:
        # The import system hangs `headway.utils.tqdm` into `headway.utils`, where `tqdm` is a function.
        if not (isinstance(value, AccelerateModule) and name in SERVED):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return dir(sys.modules["headway"])


class AccelerateFinder(MetaPathFinder, InspectLoader):
    """Finds the modules of a package, and raises for names that are not served.

    Args:
        package: "headway" or "accelerate".
        modules: that it finds, named without the package.
        find: gives what a public name stands for.
    """

    def __init__(self, package: str, modules: frozenset[str], find: Callable[[str], Any]) -> None:
        self.package = package
        self._modules = modules
        self._find = find

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module's spec; None for what is not the package's.

        Raises:
            ImportNotServed: a name of Accelerate's that is not served.
        """
        package, _, name = fullname.partition(".")
        if package != self.package or not name:
            return None
        if name in self._modules:
            return ModuleSpec(fullname, self, is_package=any(other.startswith(f"{name}.") for other in self._modules))
        from headway.compat.accelerate.served.names import advice

        # `from headway.utils import X` asks for headway.utils.X, `from headway import X` for headway.X.
        owner, _, last = name.rpartition(".")
        sentence = advice(last) if not owner or owner in self._modules else None
        if sentence is None:
            return None
        raise ImportNotServed(sentence, name=fullname)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """An empty module, filled on access."""
        return AccelerateModule(spec.name, self._modules, self._find)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing runs: names are looked up on use. Without a path of its own it is asked name by name."""
        module.__path__ = []

    def get_source(self, fullname: str) -> None:
        """None: there is no file."""

    def get_code(self, fullname: str) -> CodeType:
        """What `python -m` runs: the command."""
        own, word = (
            "headway.compat.accelerate.launching.commands",
            "launch_main" if fullname.endswith(".launch") else "main",
        )
        return compile(f"import sys; from {own} import {word}; sys.exit({word}())", f"<{fullname}>", "exec")


def install() -> None:
    """Make Accelerate's modules importable from `headway`, once per process."""
    if not _is_installed("headway"):
        sys.meta_path.append(AccelerateFinder("headway", MODULES, lambda name: getattr(sys.modules["headway"], name)))


def install_finder() -> ModuleType:
    """Make them importable from `accelerate`, before anything else of that name, once per process; returns `accelerate`."""
    if not _is_installed("accelerate"):
        sys.meta_path.insert(0, AccelerateFinder("accelerate", MODULES_AS_ACCELERATE, find_as_accelerate))
    return AccelerateModule("accelerate", MODULES_AS_ACCELERATE, find_as_accelerate)


def _is_installed(package: str) -> bool:
    # By name: a test may have imported this file a second time.
    found = (each for each in sys.meta_path if type(each).__name__ == AccelerateFinder.__name__)
    return any(getattr(each, "package", None) == package for each in found)


def install_as_accelerate() -> None:
    """Make `import accelerate` import Headway from now on, in this process and in every process it starts.

    Accelerate need not be installed; if it is, it is hidden. A second call has no effect. `headway launch --as accelerate` does
    the same without changing the script.

    Raises:
        ConfigError: the real Accelerate has already been imported, perhaps by a library that uses it.
    """
    loaded = sys.modules.get("accelerate")
    if loaded is not None and not isinstance(loaded, AccelerateModule):
        raise ConfigError(
            f"install_as_accelerate() came too late: Accelerate {getattr(loaded, '__version__', '')} has already been imported from "
            f"{getattr(loaded, '__file__', 'an unknown place')}; call it before importing anything that uses Accelerate "
            "(transformers, peft, diffusers, ...), or start the script with `headway launch --as accelerate`"
        )
    sys.path[:] = [str(FOLDER), *(each for each in sys.path if each != str(FOLDER))]
    env.change(variables(env.snapshot()))


def take_over() -> None:
    """Replace the package `accelerate` that is being imported with Headway's view of it."""
    found = sys.modules.get("accelerate")
    module = install_finder()
    module.__dict__.update({"__version__": VERSION, "__headway_version__": __version__, "__path__": []})
    if isinstance(found, ModuleType):
        for name in ("__file__", "__spec__", "__loader__", "__package__"):
            module.__dict__[name] = getattr(found, name, None)
    sys.modules["accelerate"] = module
