"""Write a checkpoint: each rank writes its part to the staging directory, then one process per disk commits it.

Hooks in `headway.core.checkpoint.resume.save_and_resume` may add further files to a checkpoint.

A save blocks the training loop or runs in the background. The ranks that write to one disk communicate through files in
the staging directory. This works from a background thread and needs no collective during training. A later save removes
the files that a failed save has left. For each part P of the checkpoint, which one rank writes, the directory contains
one of these files::

    .writing-P   a rank is writing the part   (created while all ranks wait for each other)
    .written-P   the part is on the disk      (.writing-P, renamed; lists its files, hashes, and boxes of sharded tensors)
    neither      the rank has failed
"""

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from headway.common.garbage import pause_garbage_collection
from headway.core.checkpoint import folders
from headway.core.checkpoint.format.chunks import TensorChunk
from headway.core.checkpoint.format.manifest import Manifest, TensorEntry, WrittenFile
from headway.core.checkpoint.format.tensors import hash_file, write_shards
from headway.core.checkpoint.saving.file_plan import make_sharded_entries, plan_files, plan_own_boxes
from headway.core.checkpoint.saving.snapshot import PendingCopy
from headway.core.checkpoint.state import CollectedState
from headway.core.checkpoint.stores.disk import sync_folder
from headway.core.runtime import pulse
from headway.core.runtime.events import notify_listeners
from headway.core.weights.pieces import ShardPiece
from headway.core.weights.shards import get_dtype_name
from headway.errors import CheckpointError, ObjectStoreError
from headway.log import get_logger

log = get_logger(__name__)


@dataclass(frozen=True)
class SavePolicy:
    """Options of a save, including which checkpoints are kept.

    Attributes:
        keep: Number of this run's checkpoints to keep in the parent folder, including this one. Older ones are removed
            after the commit. None: all are kept.
        protected: Folders of checkpoints to keep regardless of their age (e.g. the best checkpoint).
        owns_parent: Whether the parent folder holds only this run's checkpoints. Files that any interrupted save has
            left there are then removed. Otherwise only those of this checkpoint's name are removed.
        is_blocking: Whether to return only when the checkpoint is on the disk. False: write in the background.
        timeout: Seconds to wait for the parts of other ranks.
        is_alone: Whether only this rank saves. It then writes everything and does not communicate.
        deferrable_names: Names of tensors that change only in an optimizer step. A background save copies them while
            training continues, and the next optimizer step waits for the copies.
        is_published: Whether to notify listeners of the commit, update the file `latest`, and check before the commit
            that the manifest can be decoded. False for states that are kept in host memory.
    """

    keep: int | None = None
    protected: tuple[Path, ...] = ()
    owns_parent: bool = False
    is_blocking: bool = True
    timeout: float = 600.0
    is_alone: bool = False
    deferrable_names: frozenset[str] = frozenset()
    is_published: bool = True


@dataclass(frozen=True)
class DiskShare:
    """Part of a checkpoint that this rank writes to its disk. The defaults describe a rank that writes everything.

    Attributes:
        part: Number of the part that this rank writes. None: it writes no part.
        num_parts: Number of parts on this disk.
        is_committer: Whether this rank commits the checkpoint on this disk. There is one such rank per disk.
        is_own_disk: Whether each machine has its own disk with a replica of the checkpoint.
    """

    part: int | None = 0
    num_parts: int = 1
    is_committer: bool = True
    is_own_disk: bool = False


@dataclass(frozen=True)
class SaveJob:
    """One rank's task in a save.

    Attributes:
        final: Folder of the checkpoint.
        nonce: Random name of the staging directory, the same on all ranks.
        share: Part of the checkpoint that this rank writes.
        content: State of the run, in the same order on all ranks.
        about: The manifest's `about` section.
        policy: Options of the save, including which checkpoints are kept.
        source: Object that identifies the run, passed to the listeners that are notified of the commit. Default: None,
            this process's run.
        pending_copies: Copies and events to wait for. The content is complete once they have finished. Default: (),
            nothing to wait for.
        check_sources: Function called when this rank's part has been written. It raises `CheckpointError` if the source
            tensors have changed since the snapshot. Default: a function that does nothing.
        exchange_parts: Function called after `check_sources`, before the commit. It sends this part to other ranks and
            receives theirs. Default: a function that does nothing.
    """

    final: Path
    nonce: str
    share: DiskShare
    content: CollectedState
    about: Mapping[str, Any]
    policy: SavePolicy
    source: object = None
    pending_copies: tuple[PendingCopy, ...] = ()
    check_sources: Callable[[], None] = lambda: None
    exchange_parts: Callable[[], None] = lambda: None

    @property
    def own_names(self) -> frozenset[str]:
        """Names of the unsharded tensors that this rank writes."""
        if self.share.part is None:
            return frozenset()
        files = plan_files(self.content.tensors, self.share.num_parts)[self.share.part]
        return frozenset(name for names in files.values() for name in names)

    @property
    def staging(self) -> Path:
        """Staging directory of the save."""
        return folders.find_store(self.final).get_staging(self.nonce)

    def remove_old_checkpoints(self) -> None:
        """Remove older checkpoints of this run if the policy limits their number. Called after the commit.

        If the checkpoints cannot be listed, only a warning is logged, because the new one is saved.
        """
        if self.policy.keep is None:
            return
        try:
            folders.remove_old_checkpoints(
                self.final.parent,
                self.policy.keep,
                self.policy.protected,
                self.about.get("run"),
                self.final.name.rstrip("0123456789"),
            )
        except (OSError, ObjectStoreError) as error:
            log.warning_once("%s is saved, but older checkpoints could not be listed: %s", self.final, error)


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
        folders.find_store(job.final.parent).remove_leftovers(None if job.policy.owns_parent else job.final.name)
        job.staging.mkdir()


def mark_as_writing(job: SaveJob) -> None:
    """Create the file that marks this rank as writing. Do nothing if this rank writes no part of the checkpoint.

    It must be called after `create_staging` has run on the rank that commits the checkpoint on this disk.
    """
    if job.share.part is not None:
        writing_mark, _ = _get_marks(job, job.share.part)
        writing_mark.touch()


class Wait(Enum):
    """Reason why a thread of a save waits.

    Attributes:
        FOR_WRITER: The thread waits until the writing thread has ended.
        FOR_PARTS: The writing thread has written this rank's part, and waits for the parts of other ranks.
    """

    FOR_WRITER = 1
    FOR_PARTS = 2


class WaitRecorder:
    """Recorder of waits for the parts of other ranks, so that the hang watch does not report this rank as hanging.

    The main thread waits for other ranks itself, or for the background thread that writes the checkpoint. Meanwhile,
    the hang watch sees neither a collective nor progress. So the wait is recorded in the pulse, the status file that
    the hang watch reads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waits: set[Wait] = set()
        self._former_phase: str | None = None
        """Phase in the pulse before the wait was recorded there. None if no wait is recorded."""

    @contextmanager
    def record_wait(self, wait: Wait) -> Iterator[None]:
        """Return a context manager within which the calling thread is recorded as waiting.

        The pulse shows the wait if the training loop is blocked by it. This is so while both reasons are recorded, or
        while the main thread itself waits for the parts of other ranks.

        Args:
            wait: Reason of the wait.
        """
        is_main = threading.current_thread() is threading.main_thread()
        waits = {wait, Wait.FOR_WRITER} if is_main else {wait}
        self._update_waits(waits, set())
        try:
            yield
        finally:
            self._update_waits(set(), waits)

    def _update_waits(self, begun: set[Wait], ended: set[Wait]) -> None:
        with self._lock:
            self._waits = (self._waits | begun) - ended
            is_blocked, own_pulse = self._waits == {*Wait}, pulse.get_own_pulse()
            if is_blocked and self._former_phase is None:
                self._former_phase = own_pulse.read().phase
                own_pulse.set_phase(pulse.WAITING_FOR_PARTS)
            elif not is_blocked and self._former_phase is not None:
                own_pulse.set_phase(self._former_phase)
                self._former_phase = None


def write_checkpoint(job: SaveJob, recorder: WaitRecorder | None = None) -> Manifest | None:
    """Write this rank's part of a checkpoint. The committing rank (`DiskShare`) also commits the checkpoint.

    It waits for the other parts on this disk, commits, updates the file `latest`, removes old checkpoints, and notifies
    listeners. Failures after the commit are only logged.

    Args:
        job: Save to perform.
        recorder: Recorder of the wait for other ranks. Default: None, a new one.

    Returns:
        Manifest of the committed checkpoint, or None on ranks that do not commit.

    Raises:
        OSError: If the disk is full or failed. An earlier checkpoint in the folder is intact.
        CheckpointError: If another rank could not write its part within `policy.timeout`, a tensor was changed before
            it was copied, a load would refuse the files, or another run has taken the lock.
    """
    plan = plan_files(job.content.tensors, job.share.num_parts)
    if job.share.part is not None:
        _write_part(job, plan[job.share.part])
    job.exchange_parts()
    if not job.share.is_committer:
        return None
    with (recorder or WaitRecorder()).record_wait(Wait.FOR_PARTS):
        files, summaries = _wait_for_parts(job)
    files |= _hash_added_files(job.staging, files)
    manifest = _assemble_manifest(job, plan, files, make_sharded_entries(job.content.tensors, summaries))
    # Decode it as a load will, before it replaces a checkpoint. States in memory replace nothing, and are checked at
    # the load.
    if job.policy.is_published and not manifest.does_round_trip():
        raise CheckpointError("the manifest cannot be read back as it was written")
    folders.commit_checkpoint(job.staging, job.final, manifest)
    # The checkpoint is committed. Failures from here on must not make the save fail.
    try:
        if job.policy.is_published:
            folders.find_store(job.final).point_latest()
    except (OSError, ValueError, ObjectStoreError) as error:
        log.warning_once("%s is saved, but the file 'latest' next to it could not be written: %s", job.final, error)
    if not job.share.is_own_disk:  # with separate disks, only after every machine has committed
        job.remove_old_checkpoints()
    if job.policy.is_published:
        step, num_bytes = job.about.get("num_updates"), manifest.num_bytes()
        notify_listeners("checkpoint", step=step, source=job.source, folder=str(job.final), bytes=num_bytes)
    return manifest


def _write_part(job: SaveJob, files: Mapping[str, Sequence[str]]) -> None:
    """Write this rank's part of a checkpoint to the staging directory, and mark it as written.

    Args:
        job: Save to perform.
        files: Names of the unsharded tensors in each file of this part. Boxes of sharded tensors are added to them.

    Raises:
        OSError: If the disk is full or failed.
        CheckpointError: If a tensor was changed before it was copied, or its local layout contradicts its placements.
    """
    part = job.share.part
    writing_mark, written_mark = _get_marks(job, part)
    try:
        for copy in job.pending_copies:
            copy.wait()
        boxes = plan_own_boxes(job.content.tensors, part or 0)
        contents = {file: [(name, job.content.tensors[name]) for name in names] for file, names in files.items()}
        for file, pairs in boxes.files.items():
            contents.setdefault(file, []).extend(pairs)
        written = write_shards(job.staging, contents, job.share.num_parts)
        job.check_sources()
        listed = [[each.name, each.num_bytes, each.digests, each.piece] for each in written]
        writing_mark.write_text(json.dumps({"files": listed, **boxes.summary}))
        writing_mark.replace(written_mark)
    except BaseException:
        # Tells the committing rank about the failure. Removing a file works on a full disk too.
        writing_mark.unlink(missing_ok=True)
        raise


def _get_marks(job: SaveJob, part: int | None) -> tuple[Path, Path]:
    """Return the paths of the files that mark a part of the checkpoint as being written, and as written."""
    return job.staging / f".writing-{part}", job.staging / f".written-{part}"


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
        writing_mark, written_mark = _get_marks(job, part)
        while not written_mark.exists():
            # The second look at the written mark matters: the other mark may have been renamed to it in between.
            if not writing_mark.exists() and not written_mark.exists():
                raise CheckpointError(
                    f"part {part} of {job.share.num_parts} of {job.final} could not be written; the error of its rank names the "
                    "reason"
                )
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"part {part} of {job.share.num_parts} of {job.final} was not written in {job.policy.timeout:g} s"
                )
            time.sleep(folders.find_store(written_mark).poll_seconds)
        summary = json.loads(written_mark.read_text())
        for name, num_bytes, digests, piece in summary.pop("files"):
            files[name] = WrittenFile(name, num_bytes, tuple(digests), piece)
        summaries.append(summary)
    for part in range(job.share.num_parts):
        _, written_mark = _get_marks(job, part)
        written_mark.unlink()
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


class BackgroundSave:
    """Background thread that runs at most one save at a time."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._end = threading.Event()
        self._error: CheckpointError | None = None
        self._wait_recorder = WaitRecorder()
        self._state_lock = threading.Lock()
        self._is_writing = False
        self._end_callbacks: list[Callable[[], None]] = []

    @property
    def is_busy(self) -> bool:
        """Whether a save is running."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, job: SaveJob) -> None:
        """Start a save on the background thread. `join` must have been called after the previous save."""

        def run() -> None:
            try:
                write_checkpoint(job, self._wait_recorder)
            except BaseException as error:  # kept for raise_error(), which raises it in the training loop
                self._error = CheckpointError(
                    f"{job.final} could not be written in the background ({type(error).__name__}: {error}). Earlier checkpoints "
                    "are intact"
                )
                self._error.__cause__ = error
                remove_staging(job)
            finally:
                with self._state_lock:
                    self._is_writing = False
                    callbacks, self._end_callbacks = self._end_callbacks, []
                try:
                    for callback in callbacks:
                        callback()
                finally:
                    self._end.set()

        self._end.clear()
        self._is_writing = True
        self._thread = threading.Thread(target=run, name="headway-save", daemon=False)
        self._thread.start()

    def call_when_idle(self, callback: Callable[[], None]) -> None:
        """Call a function now if no save is running, else at the end of the running save on its thread.

        Args:
            callback: Function to call. It should not raise an error.
        """
        with self._state_lock:
            if self._is_writing:
                self._end_callbacks.append(callback)
                return
        callback()

    def join(self) -> None:
        """Wait for the running save, if there is one. If the save fails, keep its error for `raise_error`."""
        if self._thread is not None:
            with self._wait_recorder.record_wait(Wait.FOR_WRITER):
                # After Ctrl-C in Thread.join() Python regards the thread as ended, and does not wait for it at exit.
                self._end.wait()
                self._thread.join()
            self._thread = None

    def raise_error(self) -> None:
        """Raise the error of a failed save. It is raised only once. Do nothing if no save has failed.

        Raises:
            CheckpointError: If the checkpoint could not be written.
        """
        error, self._error = self._error, None
        if error is not None:
            raise error
