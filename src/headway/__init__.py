"""Headway: your own PyTorch training loop, on any hardware.

Every public name can be imported from here, and Accelerate's names too (`headway.compat.accelerate`), also by its module paths. Names
are loaded on first use, so that the command line never pays for torch, from the places that `__init__.pyi` gives them.
"""

import re
from importlib import import_module
from pathlib import Path
from typing import Any

from headway.compat.accelerate.served.names import SERVED, find, install
from headway.version import __version__ as __version__

# The stub is the table: what type checkers see is what is loaded on first use (as SPEC 1 has it).
_IMPORT = re.compile(r"^from (\S+) import \(?\s*(\w+) as", re.MULTILINE)
_STUB = Path(__file__).with_suffix(".pyi").read_text("utf-8")
_PLACES = {name: place for place, name in _IMPORT.findall(_STUB) if name not in SERVED and name != "__version__"}

__all__ = ["__version__", *sorted(_PLACES)]


def __getattr__(name: str) -> Any:
    place = _PLACES.get(name)
    if place is None:
        value = find(name)
    else:
        value = import_module(f"headway.{name}") if place == "headway" else getattr(import_module(place), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *SERVED})


install()
