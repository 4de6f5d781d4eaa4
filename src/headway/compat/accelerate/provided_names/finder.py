"""Import finder that replaces the package `accelerate` with modules that take their attributes from Headway.

`headway launch --as accelerate` and `install_as_accelerate` put a directory at the front of `sys.path`. It contains a
small package `accelerate`, which calls `replace_accelerate`, and the metadata of a distribution `accelerate` for
version checks. This package takes precedence over the real one, which need not be installed. `import headway` alone has
no such effect.

The finder is the first one in `sys.meta_path`. It creates modules without files. This module does not import torch.
"""

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any

from headway.common import env
from headway.compat.accelerate.provided_names.advice import ImportAdvisor
from headway.compat.accelerate.provided_names.as_accelerate import find_as_accelerate
from headway.compat.accelerate.provided_names.tables import MODULES_AS_ACCELERATE, PROVIDED, SURFACE, TOP
from headway.errors import ConfigError
from headway.launch.stand_in import FOLDER, VERSION, make_variables
from headway.version import __version__


class AccelerateModule(ModuleType):
    """Replacement for one of Accelerate's modules.

    Its attributes are Headway's objects of the same names, and the replacements of its submodules. Attributes that
    scripts assign are stored in the module and take precedence.

    Args:
        name: Full name of the module, such as "accelerate.utils".
    """

    def __init__(self, name: str) -> None:
        package, _, path = name.partition(".")
        super().__init__(name, f"Accelerate's `{path or package}`, served by Headway.")

    def __getattr__(self, name: str) -> Any:
        if name == "__all__":
            return [each for each in dir(self) if not each.startswith("_")]
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        path = f"{self.__name__}.{name}".partition(".")[2]
        if path in MODULES_AS_ACCELERATE and name not in PROVIDED:
            return import_module(f"{self.__name__}.{name}")
        return find_as_accelerate(name)

    def __setattr__(self, name: str, value: object) -> None:
        # Importing `accelerate.utils.tqdm` sets the module on `accelerate.utils`, where `tqdm` must stay the function.
        if not (isinstance(value, AccelerateModule) and name in PROVIDED):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        path = self.__name__.partition(".")[2]
        prefix = f"{path}." if path else ""
        below = [each.removeprefix(prefix) for each in MODULES_AS_ACCELERATE if each.startswith(prefix)]
        submodules = [each for each in below if "." not in each]
        if not path:
            return sorted({*super().__dir__(), *submodules, *TOP})
        # A package also exports the names of its modules: `accelerate.utils` those of `accelerate.utils.operations`.
        owners = [each for each in SURFACE if each == path or each.startswith(prefix)]
        names = {name for owner in owners for name in SURFACE[owner] if "." not in name}
        return sorted({*super().__dir__(), *submodules, *names})

    def __reduce__(self) -> tuple[Any, ...]:
        # cloudpickle and dill recognize modules by their exact class, and would pickle this one like any other object.
        return import_module, (self.__name__,)


class AccelerateFinder(ImportAdvisor, InspectLoader):
    """Import finder for the modules of `accelerate`.

    It raises `ImportNotServed` for names of Accelerate that Headway does not provide.
    """

    def __init__(self) -> None:
        super().__init__("accelerate", MODULES_AS_ACCELERATE)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module that replaces one of Accelerate's modules, or None for any other module.

        Raises:
            ImportNotServed: If `fullname` is a name of Accelerate that Headway does not provide.
        """
        package, _, name = fullname.partition(".")
        if package == self.package and name in MODULES_AS_ACCELERATE:
            is_package = any(other.startswith(f"{name}.") for other in MODULES_AS_ACCELERATE)
            return ModuleSpec(fullname, self, is_package=is_package)
        return super().find_spec(fullname, path, target)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return an `AccelerateModule`, which finds Headway's object when an attribute is accessed."""
        return AccelerateModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Initialize the module without running code. Its submodules are found by this finder, not in a directory.

        `accelerate.memory_utils` gives a FutureWarning, as in Accelerate.
        """
        if module.__name__ == "accelerate.memory_utils":
            warnings.warn(
                "memory_utils has been reorganized to utils.memory. Import `find_executable_batchsize` from the main `__init__`: "
                "`from accelerate import find_executable_batch_size` to avoid this warning.",
                FutureWarning,
                stacklevel=2,
            )
        module.__path__ = []

    def get_source(self, fullname: str) -> None:
        """Return None, because a module of this finder has no source file."""

    def get_code(self, fullname: str) -> CodeType:
        """Return the code that `python -m MODULE` executes. It runs the corresponding Headway command."""
        commands_module = "headway.compat.accelerate.launching.commands"
        function = "launch_main" if fullname.endswith(".launch") else "main"
        return compile(
            f"import sys; from {commands_module} import {function}; sys.exit({function}())", f"<{fullname}>", "exec"
        )


def install_finder() -> ModuleType:
    """Make Headway's replacements importable as `accelerate`, and return the replacement of the package itself.

    The finder takes precedence over any other package with this name. A second call does not install it again.
    """
    # Class names are compared, because a test might import this file a second time.
    if not any(type(each).__name__ == AccelerateFinder.__name__ for each in sys.meta_path):
        sys.meta_path.insert(0, AccelerateFinder())
    return AccelerateModule("accelerate")


def install_as_accelerate() -> None:
    """Make `import accelerate` import Headway, in this process and in all processes that it starts.

    Put a directory with a small package `accelerate` first on `sys.path` and, through environment variables, on that of
    processes that this one starts. Accelerate need not be installed. If it is, it is hidden. A second call has no
    effect. `headway launch --as accelerate` does the same without a change to the script.

    Raises:
        ConfigError: If the real Accelerate has already been imported, possibly by another library. Also if Headway is
            installed in a folder that PYTHONPATH cannot contain.
    """
    loaded = sys.modules.get("accelerate")
    if loaded is not None and not isinstance(loaded, AccelerateModule):
        raise ConfigError(
            f"install_as_accelerate() came too late: Accelerate {getattr(loaded, '__version__', '')} has already been imported from "
            f"{getattr(loaded, '__file__', 'an unknown place')}; call it before importing anything that uses Accelerate "
            "(transformers, peft, diffusers, ...), or start the script with `headway launch --as accelerate`"
        )
    variables = make_variables(env.copy_variables())  # raises an error before anything is changed
    sys.path[:] = [str(FOLDER), *(each for each in sys.path if each != str(FOLDER))]
    env.apply_changes(variables)


def replace_accelerate() -> None:
    """Replace the package `accelerate`, which is being imported, with the one that `install_finder` returns."""
    replaced = sys.modules.get("accelerate")
    replacement = install_finder()
    replacement.__dict__.update({"__version__": VERSION, "__headway_version__": __version__, "__path__": []})
    if isinstance(replaced, ModuleType):
        for name in ("__file__", "__spec__", "__loader__", "__package__"):
            replacement.__dict__[name] = getattr(replaced, name, None)
    sys.modules["accelerate"] = replacement
