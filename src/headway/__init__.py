"""Headway: your own PyTorch training loop, on any hardware.

All public names can be imported from this package. They are loaded on first use, from the modules that `__init__.pyi`
lists, so that the command line does not import torch.

Scripts written for Accelerate can replace `accelerate` by `headway` in their imports: this package also provides
Accelerate's names and modules, such as `headway.utils`. `headway.compat.accelerate` implements them.
"""

import re
from pathlib import Path
from typing import Any

from headway.common.garbage import import_without_garbage_collection
from headway.common.named_imports import import_attribute
from headway.version import __version__ as __version__

# The stub is the table of names, so that type checkers see exactly what is loaded on first use
# (as in SPEC 1 of Scientific Python).
_IMPORT = re.compile(r"^from (\S+) import \(?\s*(\w+) as", re.MULTILINE)
_STUB = Path(__file__).with_suffix(".pyi").read_text("utf-8")
_MODULES_OF_NAMES = {name: place for place, name in _IMPORT.findall(_STUB) if name != "__version__"}

# Accelerate's module paths, such as `headway.utils`. Headway's own modules come first.
__path__.append(str(Path(__file__).parent / "compat" / "accelerate" / "module_paths"))


def __getattr__(name: str) -> Any:
    place = _MODULES_OF_NAMES.get(name)
    if name == "__all__":
        value: Any = ["__version__", *sorted(_MODULES_OF_NAMES.keys() - _import_accelerate_names().PROVIDED.keys())]
    else:
        # Modules live as long as the process, so the collector would scan 200,000 new objects of torch in vain.
        # This shortens the import of torch and the Accelerator by a fifth.
        with import_without_garbage_collection():
            if place is None:
                value = _import_accelerate_names().find_provided_name(name, _MODULES_OF_NAMES)
            elif place == "headway":
                value = import_attribute(f"headway.{name}")
            else:
                value = import_attribute(place, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({"__version__", *_MODULES_OF_NAMES, *_import_accelerate_names().PROVIDED})


def _import_accelerate_names() -> Any:
    """Return the module that looks up Accelerate's names that `headway` itself does not define."""
    from headway.core import extensions

    return extensions.load("names", "accelerate")
