"""Downloads the ranges of a checkpoint that this rank needs into sparse local files, and compares each piece with its hash.

The files have the lengths of the stored ones, and take up disk space (in TMPDIR) for what was fetched only. They are removed with
the object; what has been mapped of them until then stays.
"""

import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import xxhash

from headway.checkpoint.format.manifest import TITLE, Manifest, WrittenFile
from headway.common.object_path import PART, THREADS, ObjectPath
from headway.errors import CheckpointDamaged, CheckpointError


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

    def fetch_all(self, files: Iterable[str]) -> None:
        """Have these files whole.

        Raises:
            CheckpointError: as for `fetch`.
        """
        self.fetch({file: [(0, self._manifest.files[file].num_bytes)] for file in files})

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
