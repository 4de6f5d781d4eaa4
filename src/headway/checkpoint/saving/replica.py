"""Hands a checkpoint on to machines with empty disks of their own: such as one that replaces a lost one.

Its files travel in bounded pieces from one machine that holds it, are forced to the disk, verified and committed there as in a save.
"""

import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from headway.checkpoint import folders
from headway.checkpoint.format.manifest import Manifest, read_manifest
from headway.checkpoint.loading.files import verify
from headway.errors import CheckpointError
from headway.runtime.collectives.checked import Collectives

_PIECE = 16 * 2**20


class ReplicaReceiver:
    """Builds the folder on a machine that lacks it.

    Args:
        folder: the checkpoint's name there.
        nonce: names the staging folder.
        manifest: of the checkpoint.
    """

    def __init__(self, folder: Path, nonce: str, manifest: Manifest) -> None:
        self._folder = folder
        self._manifest = manifest
        self._staging = folders.staging_folder(folder, nonce)
        self.failure: str | None = None

    def begin(self) -> None:
        """Make room."""
        self._try(lambda: self._staging.mkdir(parents=True))

    def take(self, name: str, piece: bytes, is_first: bool) -> None:
        """Write a piece of a file; after a failure nothing more."""

        def write() -> None:
            path = self._staging / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "wb" if is_first else "ab") as file:
                file.write(piece)
                file.flush()
                os.fsync(file.fileno())

        self._try(write)

    def commit(self) -> None:
        """Give the folder its name, and compare every byte."""

        def act() -> None:
            folders.commit(self._staging, self._folder, self._manifest)
            verify(self._folder)

        self._try(act)
        shutil.rmtree(self._staging, ignore_errors=True)

    def _try(self, act: Callable[[], object]) -> None:
        if self.failure is None:
            try:
                act()
            except (OSError, CheckpointError) as error:
                self.failure = f"{type(error).__name__}: {error}"


def hand_on(folder: Path, holders: Sequence[bool], is_lead: bool, collectives: Collectives) -> None:
    """Bring the checkpoint to the machines that lack it; every rank calls it.

    Args:
        folder: its folder, by the name it has on this rank's disk.
        holders: for each rank, whether its disk has it.
        is_lead: is this rank the one of its machine that writes?
        collectives: all ranks.

    Raises:
        CheckpointError: on every rank, where it could not be read on the one side or written on the other.
    """
    source = holders.index(True)
    is_source = collectives.rank == source
    manifest: Manifest = collectives.broadcast_object(read_manifest(folder) if is_source else None, source)
    nonce = collectives.broadcast_object(secrets.token_hex(8), source)
    receiver = ReplicaReceiver(folder, nonce, manifest) if is_lead and not holders[collectives.rank] else None
    if receiver is not None:
        receiver.begin()
    failure: str | None = None
    for name, written in manifest.files.items():
        pieces = _pieces(folder / name)
        for start in range(0, max(1, written.num_bytes), _PIECE):
            piece = b""
            if is_source and failure is None:
                try:
                    piece = next(pieces, b"")
                except OSError as error:
                    failure = f"{type(error).__name__}: {error}"
            piece = collectives.broadcast_object(piece, source)
            if receiver is not None:
                receiver.take(name, piece, start == 0)
    if receiver is not None:
        receiver.commit()
        failure = receiver.failure
    told = collectives.gather_objects(failure)
    failed = [f"rank {rank}: {text}" for rank, text in enumerate(told) if text is not None]
    if failed:
        raise CheckpointError(f"{folder} could not be handed on to a machine without it: " + "; ".join(failed))


def _pieces(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as file:
        while piece := file.read(_PIECE):
            yield piece
