"""Folder that makes `import accelerate` import Headway, and the variable that adds the folder to a process.

The folder is put first in PYTHONPATH, so all processes that the program starts inherit it.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from headway.errors import ConfigError

FOLDER = Path(__file__).parents[1] / "compat" / "on_path"
"""Folder with a package named `accelerate` and the metadata of a distribution with this name and `VERSION`."""

VERSION = "1.15.0"
"""Version of Accelerate whose public names are provided."""


def make_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that make a process, and all processes that it starts, import Headway as Accelerate.

    Args:
        environment: Environment of the process. Other entries of its PYTHONPATH are kept.

    Raises:
        ConfigError: If the folder's path contains the separator of PYTHONPATH.
    """
    folder = str(FOLDER)
    if os.pathsep in folder:
        raise ConfigError(
            f"Headway is installed in {folder}, but PYTHONPATH cannot contain a path with {os.pathsep!r}; install it elsewhere"
        )
    kept = [each for each in environment.get("PYTHONPATH", "").split(os.pathsep) if each and each != folder]
    return {"PYTHONPATH": os.pathsep.join([folder, *kept])}
