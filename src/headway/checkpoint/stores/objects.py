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

from headway.checkpoint.format.manifest import MANIFEST, Manifest, read_manifest
from headway.checkpoint.lock import ObjectLock
from headway.checkpoint.stores.disk import LATEST
from headway.checkpoint.stores.fetched import FetchedCheckpoint
from headway.common.object_path import PART, ObjectPath
from headway.errors import CheckpointError, ConfigError, ObjectStoreError
from headway.log import get_logger

log = get_logger(__name__)

_DATA = re.compile(r"data-[0-9a-f]{16}")


class ObjectStore:
    """A place in an object store that is a checkpoint, or holds some; its members answer as those of `DiskStore`.

    Args:
        folder: the place.
    """

    poll = 0.1
    needs_lock = True
    verifies_on_read = True

    def __init__(self, folder: ObjectPath) -> None:
        self.folder = folder

    def check_name(self) -> None:
        """Refuse a bucket as a checkpoint.

        Raises:
            ConfigError: it is one.
        """
        if not self.folder.key:
            raise ConfigError(f"{self.folder} is a whole bucket; give a place in it, such as {self.folder}/checkpoint")

    def check_target(self) -> None:
        """Refuse to write between somebody else's objects.

        Raises:
            CheckpointError: there are some.
        """
        foreign = [name for name, _ in self.folder.below() if name != MANIFEST and not _is_data(name)]
        if foreign:
            raise CheckpointError(
                f"{self.folder} holds objects ({foreign[0]}) that are not a Headway checkpoint; give a new place"
            )

    def lock(self, run: str, start: str) -> ObjectLock:
        """Keep other runs from saving here.

        Raises:
            CheckpointError: another run has it.
        """
        return ObjectLock(self.folder, run, start)

    # ---------------------------------------------------------------- save

    def staging(self, nonce: str) -> Path:
        """Where the files of one save lie."""
        place: Path = self.folder / f"data-{nonce}"
        return place

    def abandon(self) -> None:
        """Remove the files of a save that failed, where no manifest names them: its commit may have come through unheard.

        Raises:
            ObjectStoreError: the store does not answer; the next save removes what is left over.
        """
        known = _named_by(self.folder.parent)
        if known is not None and self.folder.name not in known:
            self.folder.client.delete([each.key for _, each in self.folder.below()])

    def commit(self, staging: Path, manifest: Manifest, fence: Callable[[], None]) -> None:
        """Make what was sent a checkpoint, by one conditional write.

        Args:
            staging: where the parts lie.
            manifest: its files named from `staging` on.
            fence: raises CheckpointError where another run has taken the place; it may have removed the parts then.

        Raises:
            CheckpointError: a part is missing, or another save was quicker; what was there is as it was.
        """
        placed = manifest.moved(staging.name)
        data = placed.encode()
        Manifest.decode(data)  # what could not be read back must not take the place of what can
        if problem := self.absent(placed):
            raise CheckpointError(f"{self.folder} cannot be committed: {problem}")
        path = self.folder / MANIFEST
        former = path.client.get(path.key)
        fence()
        if path.client.put(path.key, data, None if former is None else former[1]) is None:
            raise CheckpointError(
                f"{self.folder} was committed by another run at the same time; give each run its own place"
            )
        self._look_back(placed, fence)
        if former is not None:
            self._tidy(staging.name)

    def _look_back(self, placed: Manifest, fence: Callable[[], None]) -> None:
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
                if self.absent(placed) is None:
                    return
                (self.folder / MANIFEST).unlink()
            raise

    def _tidy(self, kept: str) -> None:
        """Remove the files of all other saves of that name; where that fails, the next save does it."""
        try:
            below = [(name, each.key) for name, each in self.folder.below() if _is_data(name)]
            self.folder.client.delete([key for name, key in below if name.split("/")[0] != kept])
        except CheckpointError as error:
            log.warning_once(
                "%s: the files of the checkpoint that it replaced could not be removed (%s)", self.folder, error
            )

    def point_latest(self) -> None:
        """Let the object `latest` beside the checkpoint name it."""
        (self.folder.parent / LATEST).write_text(self.folder.name + "\n")

    # ---------------------------------------------------------------- find

    def locate(self) -> Path:
        """It has no other place."""
        return self.folder

    def contents(self) -> Path:
        """Where the checkpoint's files lie: below the name that its manifest gives."""
        place: Path = self.folder / next(iter(read_manifest(self.folder).files), "").partition("/")[0]
        return place

    def identity(self) -> tuple[int, int]:
        """Which object its manifest is, as two numbers."""
        path = self.folder / MANIFEST
        found = path.client.get(path.key)
        return (0, 0) if found is None else (len(found[0]), hash(found[1]))

    def absent(self, manifest: Manifest) -> str | None:
        """The first part that is not there as it was written, and what of it; None: all are. Nothing is read."""
        there = {each.key: each.num_bytes for _, each in self.folder.below()}
        for written in manifest.files.values():
            path = self.folder / written.name
            for start in range(0, max(1, written.num_bytes), PART):
                key, wanted = path.part(start // PART), min(PART, written.num_bytes - start)
                found = there.get(key)
                if found != wanted:
                    found = path.client.size(key)  # a listing may be late
                if found != wanted:
                    what = "is not there" if found is None else f"has {found} bytes"
                    return f"{path.client.root}/{key} {what}, {wanted} were written"
        return None

    def fetched(self, manifest: Manifest) -> FetchedCheckpoint:
        """A local folder for what is read of the checkpoint."""
        return FetchedCheckpoint(self.folder, manifest)

    # ---------------------------------------------------------------- remove

    def remove(self) -> None:
        """Remove a checkpoint, its manifest first, and nothing else below that name."""
        (self.folder / MANIFEST).unlink()
        self.folder.client.delete([each.key for name, each in self.folder.below() if _is_data(name)])

    def sweep(self, name: str | None = None) -> list[Path]:
        """Remove the files of killed saves, of the checkpoint called `name` or (None) of all; returns their places.

        Not to be called while a save of that name is under way.
        """
        parent = self.folder
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


def _is_data(name: str) -> bool:
    return _DATA.fullmatch(name.split("/")[0]) is not None


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
