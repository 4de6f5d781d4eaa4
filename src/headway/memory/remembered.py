"""Batch sizes found earlier, in a JSON file that can be read and cleared. Torch-free.

An entry is found by what is known before the first attempt (the function, its arguments, the device, ...), and holds what
the attempt then showed (the model and the shapes of its inputs): one that was made with another model does not count.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headway.config.files import default_file
from headway.errors import ConfigError

FILE_NAME = "batch_sizes.json"


def default_path(environment: Mapping[str, str]) -> Path:
    """Where sizes are remembered: beside the config file ($HEADWAY_HOME, $XDG_CONFIG_HOME/headway or ~/.config/headway)."""
    return default_file(environment).with_name(FILE_NAME)


def key_of(circumstances: Mapping[str, Any]) -> str:
    """A short digest of what an entry is found by."""
    text = json.dumps(circumstances, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def read(path: Path) -> dict[str, dict[str, Any]]:
    """All entries by key; none where there is no file.

    Raises:
        ConfigError: the file is there and is not what `write` writes.
    """
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"the file of batch sizes {path} cannot be read: {error}; remove it") from error
    if not isinstance(content, dict) or not all(
        isinstance(entry, dict) and isinstance(entry.get("batch_size"), int) for entry in content.values()
    ):
        raise ConfigError(f"the file of batch sizes {path} holds something else; remove it")
    return content


def write(path: Path, key: str, entry: Mapping[str, Any]) -> None:
    """Add or replace one entry; readers see the file before or after it, never in between."""
    entries = {**read(path), key: dict(entry)}
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(descriptor, "w") as file:
            json.dump(entries, file, indent=1, sort_keys=True)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def clear(path: Path) -> int:
    """Remove the file; returns how many entries it held."""
    try:
        num_entries = len(read(path))
    except ConfigError:
        num_entries = 0
    path.unlink(missing_ok=True)
    return num_entries
