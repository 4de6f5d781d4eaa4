"""Copy a checkpoint to machines whose disks lack it, such as a replacement for a lost machine.

A machine that has the checkpoint sends its files in blocks of 16 MiB. They are flushed to the disk, verified, and
committed like a new checkpoint.
"""

import os
import secrets
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from headway.core.checkpoint import folders
from headway.core.checkpoint.format.manifest import Manifest, read_manifest
from headway.core.checkpoint.loading.files import verify_checkpoint
from headway.core.checkpoint.stores.disk import write_and_sync
from headway.core.runtime.collectives.checked import Collectives
from headway.errors import CheckpointError

_BLOCK = 16 * 2**20
"""Bytes of a file that one broadcast sends."""


class _LocalSteps:
    """Runs the steps of this rank in a collective copy, until one of them fails.

    After a failure, a rank still takes part in all broadcasts, so that the other ranks do not wait for it. For this
    reason, errors are recorded and raised only at the end.
    """

    def __init__(self) -> None:
        self._failure: str | None = None

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function unless an earlier step has failed, and return its result.

        Record an OSError or `CheckpointError` that the function raises. Return None if this step or an earlier one has
        failed.
        """
        if self._failure is not None:
            return None
        try:
            return function(*args)
        except (OSError, CheckpointError) as error:
            self._failure = f"{type(error).__name__}: {error}"
            return None

    def raise_failures(self, folder: Path, collectives: Collectives) -> None:
        """Raise an error if a step of any rank has failed. Every rank must call it.

        Args:
            folder: Folder of the checkpoint, for the message.
            collectives: Collectives over all ranks.

        Raises:
            CheckpointError: On every rank, with the failures of all ranks.
        """
        failures = collectives.gather_objects(self._failure)
        lines = [f"rank {rank}: {text}" for rank, text in enumerate(failures) if text is not None]
        if lines:
            raise CheckpointError(f"{folder} could not be copied to a machine without it: " + "; ".join(lines))


def copy_to_machines(
    folder: Path,
    has_checkpoint: Sequence[bool],
    writes_to_disk: bool,
    collectives: Collectives,
    files: Sequence[Collection[str]] | None = None,
) -> None:
    """Copy a checkpoint, or some of its files, to the machines that lack it. Every rank must call it.

    Args:
        folder: Folder of the checkpoint on this rank's disk.
        has_checkpoint: For each rank, whether its disk has the checkpoint. At least one must be True.
        writes_to_disk: Whether this rank writes the received files to its machine's disk. True on one rank per machine.
        collectives: Collectives over all ranks.
        files: For each rank, the checkpoint's files on its disk. Default: None, each disk that has the checkpoint has
            all its files.

    Raises:
        CheckpointError: On every rank, if any rank fails to read or to write.
    """
    source = has_checkpoint.index(True)
    steps = _LocalSteps()
    own_manifest = steps.run(read_manifest, folder) if collectives.rank == source else None
    manifest: Manifest | None = collectives.broadcast_object(own_manifest, source)
    if manifest is None:
        steps.raise_failures(folder, collectives)
    assert manifest is not None
    nonce = collectives.broadcast_object(secrets.token_hex(8), source)
    staging = folders.find_store(folder).get_staging(nonce)
    files_by_rank = _list_files_by_rank(manifest, has_checkpoint, files)
    own_files = files_by_rank[collectives.rank]
    is_complete = has_checkpoint[collectives.rank] and own_files >= manifest.files.keys()
    is_receiver = writes_to_disk and not is_complete
    if is_receiver:
        for name in own_files:
            steps.run(_link_file, folder / name, staging / name)
    for name, written in manifest.files.items():
        has_file = [name in rank_files for rank_files in files_by_rank]
        if all(has_file):
            continue
        received_path = staging / name if is_receiver and name not in own_files else None
        _broadcast_file(folder / name, written.num_bytes, has_file.index(True), received_path, steps, collectives)
    if is_receiver:
        steps.run(_commit_received, staging, folder, manifest)
        shutil.rmtree(staging, ignore_errors=True)
    steps.raise_failures(folder, collectives)


def _broadcast_file(
    path: Path,
    num_bytes: int,
    source: int,
    received_path: Path | None,
    steps: _LocalSteps,
    collectives: Collectives,
) -> None:
    """Send a file from one rank to all others, block by block. Every rank must call it.

    Args:
        path: Path of the file on the disk of rank `source`.
        num_bytes: Size of the file in the manifest. Every rank derives the number of broadcasts from it.
        source: Rank that sends the file.
        received_path: Path to which this rank writes the file. None: this rank drops what it receives.
        steps: Local steps of this rank, which record a failure to read or write.
        collectives: Collectives over all ranks.
    """
    blocks = _iterate_blocks(path)
    for start in range(0, max(1, num_bytes), _BLOCK):  # an empty file is sent as one empty block
        own_block = steps.run(next, blocks, b"") if collectives.rank == source else None
        block = collectives.broadcast_object(own_block or b"", source)
        if received_path is not None:
            steps.run(_append_block, received_path, block, start == 0)


def _list_files_by_rank(
    manifest: Manifest, has_checkpoint: Sequence[bool], files: Sequence[Collection[str]] | None
) -> list[set[str]]:
    """Return, for each rank, the names of the checkpoint's files on its disk.

    Args:
        manifest: Manifest of the checkpoint.
        has_checkpoint: For each rank, whether its disk has the checkpoint.
        files: For each rank, the names of the files on its disk. None: all files of the checkpoint.
    """
    if not files:
        return [set(manifest.files) if has_it else set() for has_it in has_checkpoint]
    return [set(rank_files) if has_it else set() for rank_files, has_it in zip(files, has_checkpoint)]


def _iterate_blocks(path: Path) -> Iterator[bytes]:
    """Yield the bytes of a file in blocks of `_BLOCK` bytes. The last one can be shorter."""
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            yield block


def _link_file(source: Path, target: Path) -> None:
    """Create a hard link to a file, and the folders of the link."""
    target.parent.mkdir(parents=True, exist_ok=True)
    os.link(source, target)


def _append_block(path: Path, block: bytes, is_first: bool) -> None:
    """Append a block to a file, and flush it to the disk. The first block creates the file and its folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_and_sync(path, block, "wb" if is_first else "ab")


def _commit_received(staging: Path, folder: Path, manifest: Manifest) -> None:
    """Compare every byte of the received files with the hashes, then commit them as a checkpoint.

    The commit writes the manifest, so none is read from the received files.
    """
    staging.mkdir(parents=True, exist_ok=True)  # missing if no file was sent
    verify_checkpoint(staging, manifest)
    folders.commit_checkpoint(staging, folder, manifest)
