"""The folder that makes `import accelerate` find Headway, and how a process's environment gets it.

The folder goes to the front of PYTHONPATH: whatever the process starts inherits it, whichever way it is started.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from headway.errors import ConfigError

FOLDER = Path(__file__).parents[1] / "compat" / "on_path"
"""Holds a package `accelerate`, and the metadata of a distribution of that name and version."""

VERSION = "1.15.0"
"""Of Accelerate: the one whose names are served."""


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """What a process's environment gets on top, so that it and all that it starts import Headway as Accelerate.

    Raises:
        ConfigError: the folder's path cannot stand in PYTHONPATH.
    """
    folder = str(FOLDER)
    if os.pathsep in folder:
        raise ConfigError(
            f"Headway lies in {folder}, and a path with {os.pathsep!r} in it cannot stand in PYTHONPATH; install it elsewhere, or "
            "call headway.compat.install_as_accelerate() in the script"
        )
    kept = [each for each in environment.get("PYTHONPATH", "").split(os.pathsep) if each and each != folder]
    return {"PYTHONPATH": os.pathsep.join([folder, *kept])}
