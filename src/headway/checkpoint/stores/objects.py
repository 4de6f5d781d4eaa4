"""Checkpoints as objects: parts under a prefix for each save, and a manifest whose conditional write is the commit.

::

    <name>/data-<16 hexadecimal digits>/...   the files of one save; no two saves share a name
    <name>/manifest.json                      is there when the checkpoint is; its files are named from <name> on
    <name>.lock, latest                       beside it

The manifest is written only where there is none, or in place of the one that was there when the save began to commit. A removal
takes the manifest first. What a killed save leaves is a `data-...` that no manifest names; the next save of the run that has the
place removes it, by that pattern and nothing else.
"""

import contextlib
import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from headway.checkpoint.format.manifest import MANIFEST, Manifest
from headway.common.object_path import PART, ObjectPath
from headway.errors import CheckpointError, ObjectStoreError
from headway.log import get_logger

log = get_logger(__name__)

_DATA = re.compile(r"data-[0-9a-f]{16}")


def data_folder(final: ObjectPath, nonce: str) -> ObjectPath:
    """Where the files of one save lie."""
    return final / f"data-{nonce}"  # type: ignore[no-any-return]


def check_target(final: ObjectPath) -> None:
    """Refuse to write between somebody else's objects.

    Raises:
        CheckpointError: there are some.
    """
    foreign = [name for name, _ in final.below() if name != MANIFEST and not _DATA.fullmatch(name.split("/")[0])]
    if foreign:
        raise CheckpointError(
            f"{final} holds objects ({foreign[0]}) that are not a Headway checkpoint; give a new place"
        )


def absent(folder: ObjectPath, manifest: Manifest) -> str | None:
    """The first part of a checkpoint that is not there as it was written, and what of it; None: all are. Nothing is read."""
    there = {each.key: each.num_bytes for _, each in folder.below()}
    for written in manifest.files.values():
        path = folder / written.name
        for start in range(0, max(1, written.num_bytes), PART):
            key, wanted = path.part(start // PART), min(PART, written.num_bytes - start)
            found = there.get(key)
            if found != wanted:
                found = path.client.size(key)  # a listing may be late
            if found != wanted:
                return f"{path.client.root}/{key} {'is not there' if found is None else f'has {found} bytes'}, {wanted} were written"
    return None


def commit(staging: ObjectPath, final: ObjectPath, manifest: Manifest, fence: Callable[[], None]) -> None:
    """Make what was sent a checkpoint, by one conditional write.

    Args:
        staging: where the parts lie.
        final: the checkpoint's place.
        manifest: its files named from `staging` on.
        fence: raises CheckpointError where another run has taken the place; it may have removed the parts then.

    Raises:
        CheckpointError: a part is missing, or another save was quicker; what was there is as it was.
    """
    placed = manifest.moved(staging.name)
    data = placed.encode()
    Manifest.decode(data)  # what could not be read back must not take the place of what can
    if problem := absent(final, placed):
        raise CheckpointError(f"{final} cannot be committed: {problem}")
    path = final / MANIFEST
    former = path.client.get(path.key)
    fence()
    if path.client.put(path.key, data, None if former is None else former[1]) is None:
        raise CheckpointError(f"{final} was committed by another run at the same time; give each run its own place")
    _look_back(final, placed, fence)
    if former is not None:
        _tidy(final, staging.name)


def _look_back(final: ObjectPath, placed: Manifest, fence: Callable[[], None]) -> None:
    """Take a commit back whose parts somebody has removed who took the place meanwhile.

    Raises:
        CheckpointError: it was so. A store that does not answer now says nothing: it is committed.
    """
    try:
        fence()
    except ObjectStoreError:
        return
    except CheckpointError:
        with contextlib.suppress(ObjectStoreError):
            if absent(final, placed) is None:
                return
            (final / MANIFEST).unlink()
        raise


def abandon(staging: ObjectPath) -> None:
    """Remove the files of a save that failed, where no manifest names them: its commit may have come through unheard.

    Raises:
        ObjectStoreError: the store does not answer; the next save removes what is left over.
    """
    known = _named_by(staging.parent)
    if known is not None and staging.name not in known:
        staging.client.delete([each.key for _, each in staging.below()])


def _tidy(final: ObjectPath, kept: str) -> None:
    """Remove the files of all other saves of that name; where that fails, the next save does it."""
    try:
        doomed = [each.key for name, each in final.below() if _is_data(name) and name.split("/")[0] != kept]
        final.client.delete(doomed)
    except CheckpointError as error:
        log.warning_once("%s: the files of the checkpoint that it replaced could not be removed (%s)", final, error)


def _is_data(name: str) -> bool:
    return _DATA.fullmatch(name.split("/")[0]) is not None


def remove(folder: ObjectPath) -> None:
    """Remove a checkpoint, its manifest first, and nothing else below that name."""
    (folder / MANIFEST).unlink()
    folder.client.delete([each.key for name, each in folder.below() if _is_data(name)])


def sweep(parent: ObjectPath, name: str | None = None) -> list[Path]:
    """Remove the files of killed saves, of the checkpoint called `name` or (None) of all; returns their places.

    Not to be called while a save of that name is under way.
    """
    start = parent if name is None else parent / name
    prefix = "" if name is None else f"{name}/"
    found: dict[str, set[str]] = defaultdict(set)
    committed = set()
    for below, _ in start.below():
        owner, _, rest = (prefix + below).partition("/")
        if rest == MANIFEST:
            committed.add(owner)
        elif _is_data(rest):
            found[owner].add(rest.split("/")[0])
    left = []
    for owner, folders in found.items():
        if owner in committed and len(folders) == 1:
            continue  # which the manifest names
        known = _named_by(parent / owner)
        if known is not None:
            left += [parent / owner / each for each in sorted(folders - known)]
    for path in left:
        path.client.delete([each.key for _, each in path.below()])
    return left


def _named_by(folder: ObjectPath) -> set[str] | None:
    """The saves whose files a checkpoint's manifest names, if it has one; None: it is damaged, and nobody knows.

    Raises:
        ObjectStoreError: the store does not answer.
    """
    path = folder / MANIFEST
    found = path.client.get(path.key)
    try:
        files = Manifest.decode(found[0]).files if found is not None else {}
    except CheckpointError:
        return None
    return {name.split("/")[0] for name in files}


def identity(path: ObjectPath) -> tuple[int, int]:
    """Which object it is, as two numbers."""
    found = path.client.get(path.key)
    return (0, 0) if found is None else (len(found[0]), hash(found[1]))
