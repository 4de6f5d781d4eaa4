"""Search for run logs: from the path that a user has given to the log, and for runs nearby if there is none."""

import os
from collections import deque
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from headway.common.object_path import ObjectPath
from headway.common.text import join_names
from headway.core import extensions
from headway.core.tracking.runlog import FILE
from headway.errors import ConfigError

_MAX_DEPTH = 5
"""Maximum depth of the folders that are searched for runs, counted from a given folder.

Those of `make demo` are four folders below the clone.
"""
_MAX_ENTRIES = 20_000
"""Maximum number of directory entries that a search for nearby runs reads, which takes less than 0.1 s."""


def find_log(path: Path) -> Path:
    """Return the path of the run log for `path`.

    The log is `path` itself, `log.jsonl` in the folder `path`, or the only log up to five folders below it. A log in an
    object store is downloaded, and the path of the local copy is returned.

    Raises:
        ConfigError: If there is no log, or more than one. The message names runs in nearby folders of this machine.
    """
    if isinstance(path, ObjectPath):
        local_log: Path | None = extensions.load("feature", "mirror_log").fetch_log(path)
        if local_log is None:
            raise ConfigError(
                f"{path} contains no {FILE}, or several. Give the folder of one run that contains a {FILE}"
            )
        return local_log
    if os.path.isfile(path):
        return path
    if os.path.isfile(path / FILE):
        return path / FILE
    if not os.path.isdir(path):
        existing = next((parent for parent in path.absolute().parents if os.path.isdir(parent)), Path("/"))
        raise ConfigError(
            f"there is no run at {path}: give the folder of a run, which contains a {FILE}, or that file; "
            f"{_describe_runs_below(existing)}"
        )
    folders = sorted(str(log.parent) for log in _find_logs_below(path))
    if len(folders) == 1:
        return Path(folders[0]) / FILE
    if folders:
        names = " ".join(folders[:5]) + (f" and {len(folders) - 5} more" if len(folders) > 5 else "")
        raise ConfigError(f"{path} contains no {FILE} itself, but folders below it do: headway report {names}")
    raise ConfigError(
        f"{path} is not a run: there is no {path / FILE}, and none up to {_MAX_DEPTH} folders below; "
        f"{_describe_runs_below(path.absolute().parent)}"
    )


def _describe_runs_below(folder: Path) -> str:
    """Return a clause for error messages that names the runs up to `_MAX_DEPTH` folders below `folder`, newest first."""
    logs = sorted(_find_logs_below(folder), key=os.path.getmtime, reverse=True)
    if not logs:
        return f"no run was found in {folder}, or up to {_MAX_DEPTH} folders below it"
    return f"there are runs at {join_names([os.path.relpath(log.parent) for log in logs])}"


def _find_logs_below(folder: Path) -> Iterator[Path]:
    """Yield the run logs in `folder` and up to `_MAX_DEPTH` folders below it. Hidden folders are not searched.

    The search ends after about `_MAX_ENTRIES` directory entries, because the folder might be a large one, such as the
    home directory.
    """
    waiting = deque([(folder, 0)])  # pairs of (folder, depth), so that higher folders come first
    num_entries = 0
    while waiting and num_entries <= _MAX_ENTRIES:
        current, depth = waiting.popleft()
        if not os.access(current, os.R_OK | os.X_OK):
            continue
        with os.scandir(current) as scanner:
            entries = list(islice(scanner, _MAX_ENTRIES))
        num_entries += len(entries)
        for entry in entries:
            if entry.name == FILE and entry.is_file():
                yield Path(entry.path)
            elif depth < _MAX_DEPTH and not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False):
                waiting.append((Path(entry.path), depth + 1))
