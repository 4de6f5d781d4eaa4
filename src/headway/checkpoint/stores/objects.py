"""Checkpoints as objects: parts under a prefix for each save, and a manifest whose conditional write is the commit.

::

    <name>/data-<16 hexadecimal digits>/...   the files of one save; no two saves share a name
    <name>/manifest.json                      is there when the checkpoint is; its files are named from <name> on
    <name>.lock, latest                       beside it

The manifest is written only where there is none, or in place of the one that was there when the save began to commit. A removal
takes the manifest first. What a killed save leaves is a `data-...` that no manifest names; the next save of the run that has the
place removes it, by that pattern and nothing else.

Who reads downloads the ranges that its rank needs into sparse local files, and compares each piece with its hash
(`FetchedCheckpoint`). The files have the lengths of the stored ones, and take up disk space (in TMPDIR) for what was fetched
only. They are removed with the object; what has been mapped of them until then stays.
"""

import contextlib
import re
import shutil
import tempfile
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import xxhash

from headway.checkpoint.format.manifest import MANIFEST, TITLE, Manifest, WrittenFile, read_manifest
from headway.checkpoint.lock import ObjectLock
from headway.checkpoint.stores.disk import LATEST
from headway.common.object_path import PART, THREADS, ObjectPath
from headway.errors import CheckpointDamaged, CheckpointError, ConfigError, ObjectStoreError
from headway.log import get_logger

log = get_logger(__name__)


class FetchedCheckpoint:
    """A local folder with parts of a checkpoint's files.

    Args:
        source: the checkpoint.
        manifest: its own.

    Attributes:
        folder: the local folder.
    """

    def __init__(self, source: ObjectPath, manifest: Manifest) -> None:
        self._source, self._manifest = source, manifest
        self.folder = Path(tempfile.mkdtemp(prefix="headway-"))
        weakref.finalize(self, shutil.rmtree, self.folder, True)
        self._held: dict[str, set[int]] = {}

    def header(self, file: str) -> Path:
        """The local file of that name, with its safetensors header.

        Raises:
            CheckpointError: as for `fetch`.
        """
        path, written = self.folder / file, self._manifest.files[file]
        self.fetch({file: [(0, min(8, written.num_bytes))]})
        with open(path, "rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
        self.fetch({file: [(0, min(8 + length, written.num_bytes))]})
        return path

    def fetch(self, ranges: Mapping[str, Iterable[tuple[int, int]]]) -> None:
        """Have these bytes, by file (from, to), and compare each piece they lie in with its hash.

        Raises:
            CheckpointError: a piece is not as it was written, or not to be had, or the local disk is full.
        """
        tasks: list[Callable[[], None]] = []
        for file, wanted in sorted(ranges.items()):
            written, held = self._manifest.files[file], self._begin(file)
            first = {n for begin, end in wanted for n in range(begin // written.piece, -(-end // written.piece))}
            missing = sorted(first - held)
            held.update(missing)
            tasks += [
                partial(_fetch, self._source / file, self.folder / file, written, run)
                for run in _runs(missing, written)
            ]
        in_order(tasks)

    def verify(self) -> None:
        """Read every byte of the checkpoint and compare it with what was written; nothing is kept.

        Raises:
            CheckpointError: with the first piece that is not as it was.
        """
        in_order(
            partial(_fetch, self._source / name, None, written, run)
            for name, written in self._manifest.files.items()
            for run in _runs(range(len(written.digests) if written.num_bytes else 0), written)
        )

    def _begin(self, file: str) -> set[int]:
        """Numbers of the pieces that are there."""
        if file not in self._held:
            path = self.folder / file
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "wb") as made:
                made.truncate(self._manifest.files[file].num_bytes)
            self._held[file] = set()
        return self._held[file]


def in_order(tasks: Iterable[Callable[[], None]], num_threads: int = THREADS) -> None:
    """Run tasks on several threads; the first that fails in their order is the one that raises."""
    with ThreadPoolExecutor(num_threads, "headway-read") as readers:
        running = [readers.submit(task) for task in tasks]
        try:
            for task in running:
                task.result()
        finally:
            readers.shutdown(cancel_futures=True)


def _runs(pieces: Sequence[int], written: WrittenFile) -> Iterator[range]:
    """Numbers in order, as runs without gaps that lie in one part each."""
    per_part, start = max(1, PART // written.piece), 0
    for index, number in enumerate(pieces):
        after = pieces[index + 1] if index + 1 < len(pieces) else None
        if after != number + 1 or after % per_part == 0:
            yield range(pieces[start], number + 1)
            start = index + 1


def _fetch(source: ObjectPath, local: Path | None, written: WrittenFile, run: range) -> None:
    """Ask for a run of pieces in one request; what does not fit its hash is asked for once more."""
    start, end = run.start * written.piece, min(run.stop * written.piece, written.num_bytes)
    for is_last in (False, True):
        try:
            data = (
                b"".join(source.read_range(start, end)) if end - start > PART else next(source.read_range(start, end))
            )
        except FileNotFoundError as error:
            raise CheckpointDamaged(f"a part of {source} no longer exists: {error}") from error
        view = memoryview(data)
        bad = next((n for n in run if _hash(view, n, run, written) != written.digests[n]), None)
        if bad is None:
            break
        if is_last:
            raise CheckpointDamaged(
                f"{source} is damaged: its bytes {bad * written.piece:,} to {min((bad + 1) * written.piece, end):,} are not those "
                f"written ({TITLE} differs); resume from another checkpoint"
            )
    if local is not None:
        try:
            with open(local, "r+b") as file:  # buffered, and so written to the last byte, or an error
                file.seek(start)
                file.write(view)
        except OSError as error:
            raise CheckpointError(
                f"{local} cannot be written: {error}. A rank keeps what it loads there for a while; set TMPDIR to a larger disk"
            ) from error


def _hash(view: memoryview, number: int, run: range, written: WrittenFile) -> str:
    start = (number - run.start) * written.piece
    return xxhash.xxh3_128(view[start : start + written.piece]).hexdigest()


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
