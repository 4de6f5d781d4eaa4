"""Checkpoints in an object store: each save uploads files under a new prefix, and a conditional write commits them.

Layout::

    <name>/data-<16 hexadecimal digits>/...   files of one save; no two saves share a prefix
    <name>/manifest.json                      makes the checkpoint exist; file names in it are relative to <name>
    <name>.lock, latest                       next to the checkpoint

The manifest is written only if there is none, or only over the one that existed when the commit began. When a
checkpoint is removed, its manifest is deleted first. An interrupted save leaves a `data-...` prefix that no manifest
lists. The next save of the run that holds the lock deletes such prefixes, and no other objects.

A reader (`FetchedCheckpoint`) downloads the byte ranges that its rank needs into sparse local files. Each stored file
consists of pieces, which are blocks of bytes whose hashes are in the manifest. The reader compares each downloaded
piece with its hash. A local file has the length of the stored file, but takes disk space (in TMPDIR) only for
downloaded pieces. The local files are removed together with the `FetchedCheckpoint`. Tensors that have already been
mapped from them stay valid.
"""

import contextlib
import re
import shutil
import tempfile
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import xxhash

from headway.common.object_path import PART, THREADS, ObjectPath
from headway.core.checkpoint.format.entries import HASH_NAME, WrittenFile
from headway.core.checkpoint.format.manifest import MANIFEST, Manifest, read_manifest
from headway.core.checkpoint.stores.disk import LATEST
from headway.core.checkpoint.stores.threads import run_in_order
from headway.errors import CheckpointDamaged, CheckpointError, ConfigError, ObjectStoreError
from headway.integrations.object_store.lock import ObjectLock
from headway.log import get_logger

log = get_logger(__name__)

_DATA = re.compile(r"data-[0-9a-f]{16}")
"""Name of the prefix that holds the files of one save."""


class FetchedCheckpoint:
    """Local directory into which blocks of a checkpoint's files are downloaded. The manifest has a hash of each block.

    Args:
        source: URL of the checkpoint in the object store.
        manifest: Manifest of the checkpoint.

    Attributes:
        folder: Local directory.
    """

    def __init__(self, source: ObjectPath, manifest: Manifest) -> None:
        self._source = source
        self._manifest = manifest
        self.folder = Path(tempfile.mkdtemp(prefix="headway-"))
        weakref.finalize(self, shutil.rmtree, self.folder, True)
        self._downloaded: dict[str, set[int]] = {}  # numbers of the pieces that are downloaded, by file

    def download_header(self, file: str) -> Path:
        """Download the safetensors header of a file, and return the path of the local file.

        Raises:
            CheckpointError: If a block of the file is damaged or cannot be downloaded, or the local disk is full.
        """
        path = self.folder / file
        num_bytes = self._manifest.files[file].num_bytes
        # A safetensors file begins with the length of its header, in 8 bytes.
        self.download_ranges({file: [(0, min(8, num_bytes))]})
        with open(path, "rb") as local_file:
            header_length = int.from_bytes(local_file.read(8), "little")
        self.download_ranges({file: [(0, min(8 + header_length, num_bytes))]})
        return path

    def download_ranges(self, ranges: Mapping[str, Iterable[tuple[int, int]]]) -> None:
        """Download the blocks of the files that contain the given byte ranges, and compare each block with its hash.

        Args:
            ranges: Byte ranges by file, as pairs of (begin, end).

        Raises:
            CheckpointError: If a block is damaged or cannot be downloaded, or the local disk is full.
        """
        tasks: list[Callable[[], None]] = []
        for file, byte_ranges in sorted(ranges.items()):
            entry, downloaded = self._manifest.files[file], self._begin_download(file)
            needed: set[int] = set()  # numbers of pieces
            for begin, end in byte_ranges:
                needed.update(range(begin // entry.piece, -(-end // entry.piece)))
            missing = sorted(needed - downloaded)
            downloaded.update(missing)
            tasks += [
                partial(_fetch_run, self._source / file, self.folder / file, entry, run)
                for run in _iterate_runs(missing, entry)
            ]
        run_in_order(tasks, THREADS)

    def verify(self) -> None:
        """Download every byte of the checkpoint and compare it with the hashes. The bytes are not kept.

        Raises:
            CheckpointError: If a block of a file is missing or does not match its hash. The message names the file.
        """
        tasks = (
            partial(_fetch_run, self._source / name, None, entry, run)
            for name, entry in self._manifest.files.items()
            if entry.num_bytes
            for run in _iterate_runs(range(len(entry.digests)), entry)
        )
        run_in_order(tasks, THREADS)

    def _begin_download(self, file: str) -> set[int]:
        """Return the numbers of a file's pieces that are already downloaded. A piece is a block of bytes with a hash.

        The first call for a file creates the sparse local file.
        """
        if file not in self._downloaded:
            path = self.folder / file
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "wb") as local_file:
                local_file.truncate(self._manifest.files[file].num_bytes)
            self._downloaded[file] = set()
        return self._downloaded[file]


def _iterate_runs(pieces: Sequence[int], entry: WrittenFile) -> Iterator[range]:
    """Yield ranges of consecutive piece numbers, each within one stored object.

    Args:
        pieces: Sorted numbers of the pieces to cover. A piece is a block of a file's bytes with a hash.
        entry: Manifest entry of the file that consists of the pieces.
    """
    pieces_per_object = max(1, PART // entry.piece)
    start = 0
    for index, number in enumerate(pieces):
        next_number = pieces[index + 1] if index + 1 < len(pieces) else None
        if next_number != number + 1 or next_number % pieces_per_object == 0:
            yield range(pieces[start], number + 1)
            start = index + 1


def _fetch_run(source: ObjectPath, local: Path | None, entry: WrittenFile, run: range) -> None:
    """Download consecutive pieces of a file in one request. If a hash does not match, download them once more.

    A piece is a block of bytes with a hash.

    Args:
        source: URL of the file in the object store.
        local: Local file to write the pieces to; None to only compare the hashes.
        entry: Entry of the file in the manifest.
        run: Numbers of the pieces.

    Raises:
        CheckpointDamaged: If the file no longer exists, or if a hash does not match at the second attempt either.
        CheckpointError: If the local file cannot be written.
    """
    start, end = run.start * entry.piece, min(run.stop * entry.piece, entry.num_bytes)
    for is_last in (False, True):
        try:
            chunks = source.read_range(start, end)
            # One chunk is not copied, as `join` would do.
            data = b"".join(chunks) if end - start > PART else next(chunks)
        except FileNotFoundError as error:
            raise CheckpointDamaged(f"a part of {source} no longer exists: {error}") from error
        view = memoryview(data)
        damaged = next((n for n in run if _hash_piece(view, n, run, entry) != entry.digests[n]), None)
        if damaged is None:
            break
        if is_last:
            raise CheckpointDamaged(
                f"{source} is damaged: its bytes {damaged * entry.piece:,} to {min((damaged + 1) * entry.piece, end):,} are not "
                f"those written ({HASH_NAME} differs); resume from another checkpoint"
            )
    if local is not None:
        try:
            with open(local, "r+b") as file:  # buffered: writes all bytes or raises
                file.seek(start)
                file.write(view)
        except OSError as error:
            raise CheckpointError(
                f"{local} cannot be written: {error}. A rank keeps what it loads there for a while; set TMPDIR to a larger disk"
            ) from error


def _hash_piece(view: memoryview, number: int, run: range, entry: WrittenFile) -> str:
    """Return the hash of one piece.

    Args:
        view: Bytes of the pieces in `run`.
        number: Number of the piece in the file.
        run: Numbers of consecutive pieces.
        entry: Entry of the file in the manifest.
    """
    start = (number - run.start) * entry.piece
    return xxhash.xxh3_128(view[start : start + entry.piece]).hexdigest()


class ObjectStore:
    """Checkpoint store in an object store, for one checkpoint or for all checkpoints under a prefix.

    It has the interface of `DiskStore`.

    Args:
        folder: URL of the checkpoint, or prefix of the checkpoints.

    Attributes:
        poll_seconds: Seconds between two checks for files of other ranks.
        needs_lock: Whether saves to a folder that the caller names need a lock.
        verifies_on_read: Whether readers compare each block of a file with its hash when they download it.
    """

    poll_seconds = 0.1
    needs_lock = True
    verifies_on_read = True

    def __init__(self, folder: ObjectPath) -> None:
        self.folder = folder

    def check_name(self) -> None:
        """Raise an error if the URL names a whole bucket instead of an object or prefix in a bucket.

        Raises:
            ConfigError: If the URL names a whole bucket.
        """
        if not self.folder.key:
            raise ConfigError(
                f"{self.folder} is a whole bucket; give a location in it, such as {self.folder}/checkpoint"
            )

    def check_target(self) -> None:
        """Raise an error if there are objects below the URL that do not belong to a Headway checkpoint.

        Raises:
            CheckpointError: If there are such objects.
        """
        foreign = [name for name, _ in self.folder.list_objects() if name != MANIFEST and not _is_data(name)]
        if foreign:
            raise CheckpointError(
                f"{self.folder} contains objects ({foreign[0]}) that are not a Headway checkpoint; give a new location"
            )

    def lock(self, run: str, start: str) -> ObjectLock:
        """Lock the checkpoint's URL against saves of other runs, and return the lock.

        Args:
            run: ID of the run, as in `LockOwner`.
            start: ID of this start of the run, as in `LockOwner`.

        Raises:
            CheckpointError: If another run holds the lock.
        """
        return ObjectLock(self.folder, run, start)

    # ---------------------------------------------------------------- save

    def get_staging(self, nonce: str) -> Path:
        """Return the URL prefix to which one save uploads its files.

        Args:
            nonce: Random hexadecimal text that identifies the save.
        """
        place: Path = self.folder / f"data-{nonce}"
        return place

    def remove_staging(self) -> None:
        """Delete the files of a failed save unless the manifest lists them.

        Call it on the store of the save's own prefix, which `get_staging` returns. The manifest lists the files if the
        save's commit succeeded but the store's response was lost. If the manifest is damaged, they are kept, too.

        Raises:
            ObjectStoreError: If the store does not answer. The next save then deletes the files.
        """
        listed = _read_listed_prefixes(self.folder.parent)
        if listed is not None and self.folder.name not in listed:
            self.folder.client.delete([each.key for _, each in self.folder.list_objects()])

    def commit(self, staging: Path, manifest: Manifest, ensure_locked: Callable[[], None]) -> None:
        """Commit uploaded files as a checkpoint, with one conditional write of the manifest.

        Args:
            staging: Prefix of the uploaded files.
            manifest: Manifest with file names relative to `staging`.
            ensure_locked: Function that raises `CheckpointError` if another run has taken the lock. That run might have removed
                the files.

        Raises:
            CheckpointError: If an uploaded object is missing, if another save has committed first, or if another run
                has taken the lock. If that run takes it during the commit, the error is raised only if it has also
                removed the files. The previous checkpoint is then unchanged.
        """
        full_manifest = manifest.with_files_in(staging.name)
        data = full_manifest.encode()
        full_manifest.read_back()  # an unreadable manifest must not replace a readable one
        problem = self.find_absent(full_manifest)
        if problem is not None:
            raise CheckpointError(f"{self.folder} cannot be committed: {problem}")
        path = self.folder / MANIFEST
        former_content, former_etag = path.client.get(path.key) or (None, None)
        ensure_locked()
        etag = path.client.put(path.key, data, former_etag)
        if etag is None:
            raise CheckpointError(
                f"{self.folder} was committed by another run at the same time; give each run its own location"
            )
        try:
            ensure_locked()
        except ObjectStoreError:
            pass  # the store does not answer, so the commit counts as successful
        except CheckpointError:
            if self._revert_commit(full_manifest, etag, former_content):
                raise
        if former_content is not None:
            self._delete_other_saves(staging.name)

    def _revert_commit(self, full_manifest: Manifest, etag: str, former: bytes | None) -> bool:
        """Put the previous manifest back if files of the new checkpoint have been removed by another run.

        Args:
            full_manifest: Manifest that was committed.
            etag: ETag of the committed manifest. A manifest that another run has written since then is kept.
            former: Content of the previous manifest, or None if there was no checkpoint.

        Returns:
            Whether files of the new checkpoint were missing, so that the commit was reverted. Also True if the store
            did not answer. In that case, the commit might still be in effect.
        """
        path = self.folder / MANIFEST
        with contextlib.suppress(ObjectStoreError):
            if self.find_absent(full_manifest) is None:
                return False
            if former is None:
                path.unlink()
            else:
                path.client.put(path.key, former, etag)
        return True

    def _delete_other_saves(self, kept_prefix: str) -> None:
        """Delete the files of all saves of this checkpoint except one.

        If this fails, only a warning is logged, because the next save tries again.

        Args:
            kept_prefix: Prefix of the save whose files are kept.
        """
        try:
            below = [(name, each.key) for name, each in self.folder.list_objects() if _is_data(name)]
            self.folder.client.delete([key for name, key in below if name.split("/")[0] != kept_prefix])
        except CheckpointError as error:
            log.warning_once(
                "%s: the files of the checkpoint that it replaced could not be removed (%s)", self.folder, error
            )

    def point_latest(self) -> None:
        """Write the checkpoint's name to the object `latest` next to it."""
        (self.folder.parent / LATEST).write_text(self.folder.name + "\n")

    # ---------------------------------------------------------------- find

    def find_folder(self) -> Path:
        """Return the URL of the checkpoint, which never changes.

        A checkpoint on a disk, in contrast, can have another name during a save.
        """
        return self.folder

    def get_content_folder(self) -> Path:
        """Return the URL prefix of the checkpoint's files, to which the names in its manifest are relative."""
        place: Path = self.folder / next(iter(read_manifest(self.folder).files), "").partition("/")[0]
        return place

    def read_identity(self) -> tuple[int, int]:
        """Return two numbers that identify the manifest object within this process: its length and a hash of its ETag.

        Return (0, 0) if the manifest does not exist.
        """
        path = self.folder / MANIFEST
        stored = path.client.get(path.key)
        if stored is None:
            return 0, 0
        content, etag = stored
        return len(content), hash(etag)

    def find_absent(self, manifest: Manifest) -> str | None:
        """Return a message about the first stored object that is missing or has a wrong length.

        Return None if all are complete. Contents are not read.
        """
        sizes = {each.key: each.num_bytes for _, each in self.folder.list_objects()}
        for entry in manifest.files.values():
            path = self.folder / entry.name
            for start in range(0, max(1, entry.num_bytes), PART):
                key, expected = path.make_part_key(start // PART), min(PART, entry.num_bytes - start)
                size = sizes.get(key)
                if size != expected:
                    size = path.client.get_size(key)  # listings can lag behind writes
                if size != expected:
                    problem = "is not there" if size is None else f"has {size} bytes"
                    return f"{path.client.root}/{key} {problem}, {expected} were written"
        return None

    def prepare_download(self, manifest: Manifest) -> FetchedCheckpoint:
        """Return an empty local copy of the checkpoint, into which the required byte ranges can be downloaded."""
        return FetchedCheckpoint(self.folder, manifest)

    # ---------------------------------------------------------------- remove

    def remove(self) -> None:
        """Delete the checkpoint: first its manifest, then its files. Other objects under its name are kept."""
        (self.folder / MANIFEST).unlink()
        self.folder.client.delete([each.key for name, each in self.folder.list_objects() if _is_data(name)])

    def remove_leftovers(self, name: str | None = None) -> list[Path]:
        """Delete the files of interrupted saves, and return their prefixes.

        Checkpoints whose manifest is damaged keep all their files. Do not call this method while any checkpoint that
        `name` selects is being saved.

        Args:
            name: Name of the checkpoint whose leftover files are deleted. Default: None, for the leftover files of all
                checkpoints.
        """
        parent = self.folder
        start = parent if name is None else parent / name
        path_of_start = "" if name is None else f"{name}/"
        prefixes: dict[str, set[str]] = defaultdict(set)  # of data, by checkpoint
        committed = set()  # checkpoints that have a manifest
        for path_below, _ in start.list_objects():
            checkpoint, _, path = (path_of_start + path_below).partition("/")
            if path == MANIFEST:
                committed.add(checkpoint)
            elif _is_data(path):
                prefixes[checkpoint].add(path.split("/")[0])
        leftovers: list[ObjectPath] = []
        for checkpoint, data_prefixes in prefixes.items():
            if checkpoint in committed and len(data_prefixes) == 1:
                continue  # its only prefix is the one that the manifest lists, so the manifest need not be read
            listed_prefixes = _read_listed_prefixes(parent / checkpoint)
            if listed_prefixes is not None:
                unlisted = sorted(data_prefixes - listed_prefixes)
                leftovers += [parent / checkpoint / prefix for prefix in unlisted]
        for leftover in leftovers:
            leftover.client.delete([each.key for _, each in leftover.list_objects()])
        return list(leftovers)


def _is_data(name: str) -> bool:
    """Whether an object belongs to the files of a save, given its name below the checkpoint's URL."""
    return _DATA.fullmatch(name.split("/")[0]) is not None


def _read_listed_prefixes(folder: ObjectPath) -> set[str] | None:
    """Return the set of prefixes (`data-...`) that a checkpoint's manifest lists, or None if the manifest is damaged.

    Each prefix holds the files of one save. The set is empty if there is no manifest.

    Raises:
        ObjectStoreError: If the store does not answer.
    """
    path = folder / MANIFEST
    stored = path.client.get(path.key)
    if stored is None:
        return set()
    content, _ = stored
    try:
        files = Manifest.decode(content).files
    except CheckpointError:
        return None
    return {name.split("/")[0] for name in files}
