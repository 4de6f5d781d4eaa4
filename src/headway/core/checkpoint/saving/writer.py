"""Write a checkpoint: each rank writes its part to the staging directory, then one process per disk commits it.

`Saver` calls `create_staging`, hooks (`headway.core.checkpoint.resume.hooks`) that may add further files,
`mark_as_writing`, and `write_checkpoint`, which runs in the background if the save does not block. After a failure, it
calls `remove_staging`.

The ranks that write to one disk communicate through files in the staging directory (`get_part_marks`). This works from a
background thread and needs no collective during training. A later save removes the files that a failed save has left.
"""

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from headway.common.garbage import pause_garbage_collection
from headway.core.checkpoint import folders
from headway.core.checkpoint.format.chunks import TensorChunk
from headway.core.checkpoint.format.entries import TensorEntry, WrittenFile
from headway.core.checkpoint.format.manifest import Manifest
from headway.core.checkpoint.format.tensors import hash_file, write_shards
from headway.core.checkpoint.saving.file_plan import make_sharded_entries, plan_files, plan_own_boxes
from headway.core.checkpoint.saving.job import SaveJob
from headway.core.checkpoint.saving.waits import Wait, WaitRecorder
from headway.core.checkpoint.stores.disk import sync_folder
from headway.core.runtime.events import notify_listeners
from headway.core.weights.pieces import ShardPiece
from headway.core.weights.tensor_bytes import get_dtype_name
from headway.errors import CheckpointError, ObjectStoreError
from headway.log import get_logger

log = get_logger(__name__)


def create_staging(job: SaveJob) -> None:
    """Create the staging directory of a save, on the rank that commits on this disk. Other ranks create nothing.

    Files that interrupted saves have left are removed first. Called on the main thread after all ranks have agreed on
    the save.

    Raises:
        OSError: If the directory cannot be created.
        CheckpointError: If the checkpoint's path contains a NUL character, or something other than a checkpoint is
            there.
    """
    if "\0" in str(job.final):
        raise CheckpointError(
            f"{str(job.final)!r} contains a NUL character, which no folder name can contain. Give another name"
        )
    if job.share.is_committer:
        folders.find_store(job.final).check_target()
        job.final.parent.mkdir(parents=True, exist_ok=True)
        # A folder that the run does not own may hold checkpoints of other runs, whose leftovers are kept.
        folders.find_store(job.final.parent).remove_leftovers(None if job.policy.owns_parent else job.final.name)
        job.staging.mkdir()


def mark_as_writing(job: SaveJob) -> None:
    """Create the file that marks this rank as writing. Do nothing if this rank writes no part of the checkpoint.

    It must be called after `create_staging` has run on the rank that commits the checkpoint on this disk.
    """
    if job.share.part is not None:
        get_part_marks(job.staging, job.share.part).writing.touch()


def write_checkpoint(job: SaveJob, recorder: WaitRecorder | None = None) -> Manifest | None:
    """Write this rank's part of a checkpoint. The committing rank (`DiskShare`) also commits the checkpoint.

    The committing rank waits for the other parts on this disk, and then commits. Afterwards, it updates the file `latest`,
    removes old checkpoints, and notifies listeners. Failures after the commit are only logged.

    Args:
        job: Save to perform.
        recorder: Recorder of the wait for other ranks. Default: None, a new one.

    Returns:
        Manifest of the committed checkpoint, or None on ranks that do not commit.

    Raises:
        OSError: If the disk is full or failed. An earlier checkpoint in the folder is intact.
        CheckpointError: If another rank could not write its part within `policy.timeout`, the ranks' sharded tensors do
            not fit together, a tensor was changed before it was copied, the manifest cannot be read back, or another run
            has taken the lock of the folder.
    """
    plan = plan_files(job.content.tensors, job.share.num_parts)
    if job.share.part is not None:
        _write_part(job, plan[job.share.part])
    job.exchange_parts()  # if machines have separate disks, sends this part to other machines and receives theirs
    if not job.share.is_committer:
        return None
    with (recorder or WaitRecorder()).record_wait(Wait.FOR_PARTS):
        files, summaries = _wait_for_parts(job)
    files |= _hash_added_files(job.staging, files)
    manifest = _assemble_manifest(job, plan, files, make_sharded_entries(job.content.tensors, summaries))
    # Before it replaces a checkpoint, decode the manifest as a load will. A state that is only kept in memory (not
    # `is_published`) replaces no checkpoint, and is checked when it is loaded.
    if job.policy.is_published and not manifest.does_round_trip():
        raise CheckpointError("the manifest cannot be read back as it was written")
    folders.commit_checkpoint(job.staging, job.final, manifest)
    # The checkpoint is committed. Failures from here on must not make the save fail.
    try:
        if job.policy.is_published:
            folders.find_store(job.final).point_latest()
    except (OSError, ValueError, ObjectStoreError) as error:
        log.warning_once("%s is saved, but the file 'latest' next to it could not be written: %s", job.final, error)
    if not job.share.is_own_disk:  # otherwise, they are removed after every machine has committed
        job.remove_old_checkpoints()
    if job.policy.is_published:
        step, num_bytes = job.about.get("num_updates"), manifest.num_bytes()
        notify_listeners("checkpoint", step=step, source=job.source, folder=str(job.final), bytes=num_bytes)
    return manifest


def _write_part(job: SaveJob, files: Mapping[str, Sequence[str]]) -> None:
    """Write this rank's part of a checkpoint to the staging directory, and mark it as written.

    Args:
        job: Save to perform.
        files: Names of the unsharded tensors in each file of this part. The rank's boxes (rectangular blocks) of sharded
            tensors are written, too.

    Raises:
        OSError: If the disk is full or failed.
        CheckpointError: If a tensor was changed before it was copied, or its local layout contradicts its placements.
    """
    part = job.share.part
    marks = get_part_marks(job.staging, part)
    try:
        for copy in job.pending_copies:
            copy.wait()
        boxes = plan_own_boxes(job.content.tensors, part or 0)
        contents = {file: [(name, job.content.tensors[name]) for name in names] for file, names in files.items()}
        for file, pairs in boxes.files.items():
            contents.setdefault(file, []).extend(pairs)
        written = write_shards(job.staging, contents, job.share.num_parts)
        job.check_sources()  # raises an error if training has changed a tensor meanwhile
        listed = [[each.name, each.num_bytes, each.digests, each.piece] for each in written]
        marks.writing.write_text(json.dumps({"files": listed, **boxes.summary}))
        marks.writing.replace(marks.written)
    except BaseException:
        # Tells the committing rank about the failure. Removing a file works on a full disk too.
        marks.writing.unlink(missing_ok=True)
        raise


class PartMarks(NamedTuple):
    """Files in a staging directory that mark the state of one part of a checkpoint. Only one of them exists.

    `writing` exists while a rank writes the part. It is created while all ranks wait for each other. Then it is renamed
    to `written`, and lists the part's files, their hashes, and boxes of sharded tensors. If neither exists, the rank has
    failed.

    Attributes:
        writing: Path of the file `.writing-P`, where P is the number of the part.
        written: Path of the file `.written-P`.
    """

    writing: Path
    written: Path


def get_part_marks(staging: Path, part: int | None) -> PartMarks:
    """Return the paths of the two files that mark the state of one part of a checkpoint.

    Args:
        staging: Staging directory of the save.
        part: Number of the part, from 0.
    """
    return PartMarks(staging / f".writing-{part}", staging / f".written-{part}")


def _wait_for_parts(job: SaveJob) -> tuple[dict[str, WrittenFile], list[dict[str, Any]]]:
    """Wait until all parts of the checkpoint on this disk have been written. Then remove the files that mark them.

    Returns:
        Pair of (written files by name, one `OwnBoxes.summary` per part).

    Raises:
        CheckpointError: If a part could not be written, or was not written within `policy.timeout`.
    """
    files: dict[str, WrittenFile] = {}
    summaries = []
    deadline = time.monotonic() + job.policy.timeout
    for part in range(job.share.num_parts):
        marks = get_part_marks(job.staging, part)
        while not marks.written.exists():
            # The second look at the written mark matters: the other mark may have been renamed to it in between.
            if not marks.writing.exists() and not marks.written.exists():
                raise CheckpointError(
                    f"part {part} of {job.share.num_parts} of {job.final} could not be written; the error of its rank names the "
                    "reason"
                )
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"part {part} of {job.share.num_parts} of {job.final} was not written in {job.policy.timeout:g} s"
                )
            time.sleep(folders.find_store(marks.written).poll_seconds)
        summary = json.loads(marks.written.read_text())
        for name, num_bytes, digests, piece in summary.pop("files"):
            files[name] = WrittenFile(name, num_bytes, tuple(digests), piece)
        summaries.append(summary)
    for part in range(job.share.num_parts):
        get_part_marks(job.staging, part).written.unlink()
    return files, summaries


def _hash_added_files(staging: Path, rank_files: Mapping[str, WrittenFile]) -> dict[str, WrittenFile]:
    """Hash the files that hooks have added to the staging directory, flush them to the disk, and return them by name.

    Args:
        staging: Staging directory.
        rank_files: Files that ranks have written, by name.
    """
    added = {}
    for path in sorted(staging.rglob("*")):
        name = path.relative_to(staging).as_posix()
        if path.is_dir():
            sync_folder(path)
        elif name not in rank_files:
            added[name] = hash_file(path, name)
    return added


@pause_garbage_collection()
def _assemble_manifest(
    job: SaveJob,
    plan: Sequence[Mapping[str, Sequence[str]]],
    files: Mapping[str, WrittenFile],
    sharded_entries: Mapping[str, TensorEntry],
) -> Manifest:
    """Return the manifest of a checkpoint.

    Args:
        job: Save with the content of the checkpoint.
        plan: For each part, the names of unsharded tensors by file name.
        files: Files of the checkpoint by name.
        sharded_entries: Entries of the sharded tensors by name.
    """
    file_names = {name: file for part in plan for file, names in part.items() for name in names}
    tensors: dict[str, TensorEntry] = {}
    for name, tensor in job.content.tensors.items():
        if isinstance(tensor, ShardPiece):
            tensors[name] = sharded_entries[name]
        else:
            chunk = TensorChunk((0,) * tensor.ndim, tuple(tensor.shape), file_names[name], name)
            tensors[name] = TensorEntry(tuple(tensor.shape), get_dtype_name(tensor.dtype), (chunk,))
    return Manifest(tensors, dict(sorted(files.items())), job.content.aliases, job.content.state, job.about)


def remove_staging(job: SaveJob) -> None:
    """Remove the staging directory of a failed save, on the rank that commits on this disk. Errors are ignored."""
    if job.share.is_committer:
        with suppress(OSError, ValueError, CheckpointError):  # ValueError: the name contains a NUL
            folders.find_store(job.staging).remove_staging()
