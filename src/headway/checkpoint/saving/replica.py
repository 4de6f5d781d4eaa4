"""Hands a checkpoint on to machines with empty disks of their own: such as one that replaces a lost one.

Its files travel in bounded pieces from one machine that holds it, are forced to the disk, verified and committed there as in a save.
"""

import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from headway.checkpoint import folders
from headway.checkpoint.format.manifest import Manifest, read_manifest
from headway.checkpoint.loading.files import verify
from headway.errors import CheckpointError
from headway.runtime.collectives.checked import Collectives

_PIECE = 16 * 2**20


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
    staging = folders.staging_folder(folder, nonce)
    is_receiver = is_lead and not holders[collectives.rank]
    failures: list[str] = []

    def attempt(act: Callable[..., Any], *given: Any) -> Any:
        """After a failure nothing more."""
        try:
            return None if failures else act(*given)
        except (OSError, CheckpointError) as error:
            failures.append(f"{type(error).__name__}: {error}")
            return None

    for name, written in manifest.files.items():
        pieces = _pieces(folder / name)
        for start in range(0, max(1, written.num_bytes), _PIECE):
            piece = collectives.broadcast_object(attempt(next, pieces, b"") or b"" if is_source else b"", source)
            if is_receiver:
                attempt(_append, staging / name, piece, start == 0)
    if is_receiver:
        attempt(_commit, staging, folder, manifest)
        shutil.rmtree(staging, ignore_errors=True)
    told = collectives.gather_objects(next(iter(failures), None))
    failed = [f"rank {rank}: {text}" for rank, text in enumerate(told) if text is not None]
    if failed:
        raise CheckpointError(f"{folder} could not be handed on to a machine without it: " + "; ".join(failed))


def _pieces(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as file:
        while piece := file.read(_PIECE):
            yield piece


def _append(path: Path, piece: bytes, is_first: bool) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb" if is_first else "ab") as file:
        file.write(piece)
        file.flush()
        os.fsync(file.fileno())


def _commit(staging: Path, folder: Path, manifest: Manifest) -> None:
    """Give the folder its name, and compare every byte."""
    staging.mkdir(parents=True, exist_ok=True)  # where there was no file
    folders.commit(staging, folder, manifest)
    verify(folder)
