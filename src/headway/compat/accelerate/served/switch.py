"""Headway under Accelerate's name: `import accelerate`, in this process and in every process it starts.

A folder at the front of the path holds a package `accelerate` of a few lines, which calls `take_over`, and the metadata of
a distribution `accelerate`, for version checks. It takes precedence over the real package, which need not be installed.
"""

import sys
from types import ModuleType

from headway.common import env
from headway.compat.accelerate.served.finder import AccelerateModule
from headway.compat.accelerate.served.finder import install_as_accelerate as install_finder
from headway.errors import ConfigError
from headway.launch.stand_in import FOLDER, VERSION, variables
from headway.version import __version__


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
