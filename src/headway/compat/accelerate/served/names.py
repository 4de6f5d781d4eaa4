"""Accelerate's names and module paths: which are served, from where and with what difference, and what to use for the others.

`names.txt` has the tables, which together answer for every public name of Accelerate 1.15; a house test compares. Names stand in
lines of text, by what they have in common. `{megatron}` in a sentence is that of the table of sentences.

Accelerate's modules are views: `headway.utils` and the like, and `accelerate` itself where Headway stands in for it.
`from headway.utils import set_seed` finds what `headway` has. A finder at the end of `sys.meta_path` is asked only for what
nobody else found, so other imports pay nothing. It makes a module without a file, whose names are looked up in `headway`; and for
`from headway import X` with a name of Accelerate's that is not served it raises NotServed, an ImportError with the sentence that
says what to use. A second one of the kind, at the beginning, does the same for `accelerate` after `take_over`, which a folder at
the front of the path calls: it holds a package `accelerate` of a few lines, and the metadata of a distribution `accelerate`, for
version checks. It takes precedence over the real package, which need not be installed. Nothing here imports torch.
"""

import sys
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NoReturn

from headway.common import env
from headway.errors import ConfigError, ImportNotServed, NotServed
from headway.launch.stand_in import FOLDER, VERSION, variables
from headway.version import __version__


def _tables() -> dict[str, dict[str, str]]:
    """By table, key -> text: `[table]`, then each key on a line of its own, and under it its text, indented.

    Without the standard library's parsers: this is imported with `headway`, while the user's folder still comes first on the path.
    """
    found: dict[str, dict[str, str]] = {}
    table, key = dict[str, str](), ""
    for line in Path(__file__).with_name("names.txt").read_text("utf-8").splitlines():
        if line.startswith("["):
            table = found.setdefault(line.strip("[]"), {})
        elif line.startswith(" "):
            table[key] = f"{table[key]} {line.strip()}".lstrip()
        else:
            key, table[line] = line, ""
    return found


_TABLES = _tables()


def _by_name(table: str) -> dict[str, str]:
    """Name -> what the names of a group have in common."""
    return {name: common for common, names in _TABLES[table].items() for name in names.split()}


def _sentences(told: dict[str, str]) -> dict[str, str]:
    return {name: sentence.format_map(_TABLES["sentences"]) for name, sentence in told.items()}


def _places(table: str) -> dict[str, tuple[str, str]]:
    """Name -> (module, what it is called there)."""
    return {name: (place.partition(":")[0], place.partition(":")[2]) for name, place in _TABLES[table].items()}


SERVED = _by_name("served")
"""Name -> module, for what is Accelerate's and not one of Headway's own names."""

RENAMED = _places("renamed")
"""Name -> (module, what it is called there), for `isinstance` above all."""

MODULES = frozenset(_TABLES["modules"]["all"].split())
"""Accelerate's modules under the names that a changed import gives them: `headway.utils`, `headway.state`, ...

Not among them: `accelerator` and `tracking`, which Headway has itself.
"""

AS_ACCELERATE: dict[str, tuple[str, str]] = {
    **{name: (place, name) for name, place in _by_name("served as accelerate").items()},
    **_places("renamed as accelerate"),
}
"""Name -> (module, name there), for what `import accelerate` gives where Headway stands in for it, and `headway` does not."""

MODULES_AS_ACCELERATE = MODULES | {*_TABLES["modules as accelerate"]["all"].split()}
"""The modules of `accelerate` itself where Headway stands in for it."""

NAMES = _sentences(_by_name("not served"))
"""Public name that Headway does not serve -> a sentence that says why and what to use instead."""

MEMBERS = _sentences(_TABLES["members not served"])
"""Member of Accelerate's Accelerator -> sentence."""

REFUSED = _sentences(_TABLES["refused"])
"""What is there under Accelerate's name and refused when it is used: names, members, and arguments of calls -> sentence."""

DIFFERENT = _by_name("different")
"""Name that is served -> how it differs."""

SURFACE: dict[str, list[str]] = {module: names.split() for module, names in _TABLES["surface"].items()}
"""Module, without `accelerate.`, -> its public names."""


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
        return import_module(f"headway.{name}")
    raise AttributeError(advice(name) or f"module 'headway' has no name {name!r}")


def find_as_accelerate(name: str) -> Any:
    """What `accelerate.NAME` is where Headway stands in for Accelerate; of a name that is not served, a class that says so.

    Raises:
        AttributeError: Accelerate has no such name either.
    """
    if name in AS_ACCELERATE:
        place, own = AS_ACCELERATE[name]
        return getattr(import_module(place), own)
    try:
        return getattr(import_module("headway"), name)
    except AttributeError as error:
        sentence = advice(name)
        if sentence is not None:
            return refused(name, sentence)  # a script that only imports it runs
        raise AttributeError(f"module 'accelerate', served by Headway, has no attribute {name!r}", name=name) from error


class Refused(type):
    """Classes that stand for what is not served: they can be imported and named, and say so when they are called or subclassed."""

    def __call__(cls, *args: object, **kwargs: object) -> NoReturn:
        """Refuse.

        Raises:
            NotServed: always; the message says what to use.
        """
        raise NotServed(cls.__doc__ or cls.__name__)


@cache
def refused(name: str, sentence: str) -> Refused:
    """What stands for a name that is not served: the same object each time."""
    return Refused(name, (), {"__doc__": sentence, "__module__": "accelerate"})


def advice(name: str) -> str | None:
    """What an error says about an Accelerate name that is not served; None for any other name."""
    why = NAMES.get(name)
    return None if why is None else f"headway has no {name!r}: {why}"


def member_advice(name: str) -> str | None:
    """The same for a member of the Accelerator."""
    why = MEMBERS.get(name)
    return None if why is None else f"Headway's Accelerator has no {name!r}: {why}"


# -------------------------------------------------------------------- modules and the finder


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
        own = "headway.compat.accelerate.launching.commands"
        word = "launch_main" if fullname.endswith(".launch") else "main"
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
