"""Write a checkpoint: each rank writes its part to the staging directory, then one process per disk commits it.

Hooks in `headway.core.checkpoint.resume.save_and_resume` may add further files to a checkpoint.

A save blocks the training loop or runs in the background. The ranks of one disk communicate through files in the
staging directory. This works from a background thread and needs no collective during training. A later save removes the
files that a failed save has left. For each rank R, the directory contains one of these files::

    .writing-R   rank R is writing         (created while all ranks wait for each other)
    .written-R   its part is on the disk   (.writing-R, renamed; lists its files, hashes, and boxes of sharded tensors)
    neither      it failed
"""

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from headway.common.garbage import pause_garbage_collection
from headway.core.checkpoint import folders
from headway.core.checkpoint.format.chunks import TensorChunk, make_file_name
from headway.core.checkpoint.format.manifest import Manifest, TensorEntry, WrittenFile
from headway.core.checkpoint.format.tensors import hash_file, write_shards
from headway.core.checkpoint.saving.snapshot import SavePoint, make_entries, own_part, pattern_of
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
        keep: Number of checkpoints to keep, including this one. None: all.
        protected: Folders to keep regardless of their age (e.g. the best checkpoint).
        owns_parent: Whether the parent folder holds only this run's checkpoints.
        is_blocking: Whether to return only when the checkpoint is on the disk. False: write in the background.
        timeout: Seconds to wait for the parts of other ranks.
        is_alone: Whether only this rank saves. It then writes everything and does not communicate.
        steady: Names of tensors that change only in an optimizer step. The step waits until they are copied, so they
            may be copied in the background.
        is_told: Whether to notify listeners of the commit, update the file `latest`, and check before the commit that
            the manifest can be decoded. False for states that are kept in host memory.
    """

    keep: int | None = None
    protected: tuple[Path, ...] = ()
    owns_parent: bool = False
    is_blocking: bool = True
    timeout: float = 600.0
    is_alone: bool = False
    steady: frozenset[str] = frozenset()
    is_told: bool = True


@dataclass(frozen=True)
class DiskShare:
    """Part of a checkpoint that this rank writes to its disk. The defaults describe a rank that writes everything.

    Attributes:
        part: Number of the part that this rank writes. None: it writes no part.
        num_parts: Number of parts on this disk.
        leads: Whether this rank commits the checkpoint on this disk. There is one such rank per disk.
        is_own_disk: Whether each machine has its own disk with a replica of the checkpoint.
    """

    part: int | None = 0
    num_parts: int = 1
    leads: bool = True
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
        arrivals: Events and copies to wait for. The content is complete once they have finished. Default: (), nothing
            to wait for.
        confirm: Function called when this rank's part has been written. It raises `CheckpointError` if the source
            tensors have changed since the snapshot. Default: a function that does nothing.
        spread: Function called after `confirm`, before the commit. It sends this part to other ranks and receives
            theirs. Default: a function that does nothing.
    """

    final: Path
    nonce: str
    share: DiskShare
    content: CollectedState
    about: Mapping[str, Any]
    policy: SavePolicy
    source: object = None
    arrivals: tuple[SavePoint, ...] = ()
    confirm: Callable[[], None] = lambda: None
    spread: Callable[[], None] = lambda: None

    @property
    def own_names(self) -> frozenset[str]:
        """Names of the unsharded tensors that this rank writes."""
        if self.share.part is None:
            return frozenset()
        files = plan_files(self.content.tensors, self.share.num_parts)[self.share.part]  # unsharded tensors only
        return frozenset(name for names in files.values() for name in names)

    @property
    def staging(self) -> Path:
        """Staging directory of the save."""
        return folders.find_store(self.final).get_staging(self.nonce)

    def rotate(self) -> None:
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


def partition(sizes: Mapping[str, int], num_parts: int) -> list[list[str]]:
    """Split tensor names, in order, into `num_parts` consecutive lists of about equal total size in bytes.

    Args:
        sizes: Sizes of the tensors in bytes, by name.
        num_parts: Number of lists.
    """
    total, done = sum(sizes.values()), 0
    parts: list[list[str]] = [[] for _ in range(num_parts)]
    for name, size in sizes.items():
        # Assigned by the middle of the tensor, so that rounding leaves no part empty.
        index = min(num_parts - 1, (2 * done + size) * num_parts // (2 * total)) if total else 0
        parts[index].append(name)
        done += size
    return parts


@pause_garbage_collection()
def plan_files(tensors: Mapping[str, torch.Tensor | ShardPiece], num_parts: int) -> list[dict[str, list[str]]]:
    """Distribute the unsharded tensors over the parts of a checkpoint, and over the files of each part.

    Tensors whose names begin with different components, such as `model/` and `optimizer/`, are in different files.

    Args:
        tensors: The state to save, by name. Sharded tensors are skipped.
        num_parts: Number of parts. Each part is written by one rank.

    Returns:
        For each part, a mapping from file names to names of tensors.
    """
    plan: list[dict[str, list[str]]] = []
    sizes = {
        name: tensor.numel() * tensor.element_size()
        for name, tensor in tensors.items()
        if not isinstance(tensor, ShardPiece)
    }
    for index, names in enumerate(partition(sizes, num_parts)):
        files: dict[str, list[str]] = {}
        for name in names:
            files.setdefault(make_file_name(pattern_of(name), index), []).append(name)
        plan.append(files)
    return plan


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
    if job.share.leads:
        folders.find_store(job.final).check_target()
        job.final.parent.mkdir(parents=True, exist_ok=True)
        folders.find_store(job.final.parent).remove_leftovers(None if job.policy.owns_parent else job.final.name)
        job.staging.mkdir()


def mark_as_writing(job: SaveJob) -> None:
    """Create the file that marks this rank as writing. Do nothing if this rank writes no part of the checkpoint.

    It must be called after `create_staging` has run on the rank that commits the checkpoint on this disk.
    """
    if job.share.part is not None:
        (job.staging / f".writing-{job.share.part}").touch()


class SaveWait:
    """Recorder of waits for the parts of other ranks, so that the hang watch does not report this rank as hanging.

    The main thread waits for other ranks itself, or for the background thread that writes the checkpoint. Meanwhile,
    the hang watch sees neither a collective nor progress. So the wait is recorded in the pulse, the status file that
    the hang watch reads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now: set[str] = set()
        self._former: str | None = None

    @contextmanager
    def record_wait(self, *what: str) -> Iterator[None]:
        """Return a context manager within which the calling thread is recorded as waiting.

        The pulse shows the wait while "joined" and "collecting" are both recorded.

        Args:
            what: "joined" if the thread waits for the writing thread. "collecting" if the thread has written this
                rank's part and waits for the others. On the main thread, "joined" is always added.
        """
        is_main = threading.current_thread() is threading.main_thread()
        added = {*what, "joined"} if is_main else {*what}
        self._update_wait(added, set())
        try:
            yield
        finally:
            self._update_wait(set(), added)

    def _update_wait(self, added: set[str], gone: set[str]) -> None:
        with self._lock:
            self._now = (self._now | added) - gone
            is_waiting, own = self._now == {"collecting", "joined"}, pulse.get_own_pulse()
            if is_waiting and self._former is None:
                self._former = own.read().phase
                own.set_phase(pulse.WAITING_FOR_PARTS)
            elif not is_waiting and self._former is not None:
                own.set_phase(self._former)
                self._former = None


def write(job: SaveJob, wait: SaveWait | None = None) -> Manifest | None:
    """Write this rank's part of a checkpoint. If this rank leads its disk (`DiskShare`), also commit the checkpoint.

    Args:
        job: Save to perform.
        wait: Recorder of the wait for other ranks. Default: None, a new one.

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
    job.spread()
    if not job.share.leads:
        return None
    with (wait or SaveWait()).record_wait("collecting"):
        files, told = _wait_for_parts(job)
    files |= _added_files(job.staging, files)
    manifest = _assemble_manifest(job, plan, files, make_entries(job.content.tensors, told))
    # Decode it as a load will, before it replaces a checkpoint. States in memory replace nothing, and are checked at
    # the load.
    if job.policy.is_told and not manifest.does_round_trip():
        raise CheckpointError("the manifest cannot be read back as it was written")
    folders.commit_checkpoint(job.staging, job.final, manifest)
    # The checkpoint is committed. Failures from here on must not make the save fail.
    try:
        if job.policy.is_told:
            folders.find_store(job.final).point_latest()
    except (OSError, ValueError, ObjectStoreError) as error:
        log.warning_once("%s is saved, but the file 'latest' next to it could not be written: %s", job.final, error)
    if not job.share.is_own_disk:  # with separate disks, only after every machine has committed
        job.rotate()
    if job.policy.is_told:
        step, num_bytes = job.about.get("num_updates"), manifest.num_bytes()
        notify_listeners("checkpoint", step=step, source=job.source, folder=str(job.final), bytes=num_bytes)
    return manifest


def _write_part(job: SaveJob, files: Mapping[str, Sequence[str]]) -> None:
    part = job.share.part
    working, done = job.staging / f".writing-{part}", job.staging / f".written-{part}"
    try:
        for arrival in job.arrivals:
            arrival.wait()
        spread, told = own_part(job.content.tensors, part or 0)
        parts = {file: [(name, job.content.tensors[name]) for name in names] for file, names in files.items()}
        for file, boxes in spread.items():
            parts.setdefault(file, []).extend(boxes)
        written = write_shards(job.staging, parts, job.share.num_parts)
        job.confirm()
        working.write_text(json.dumps({"files": [[w.name, w.num_bytes, w.digests, w.piece] for w in written], **told}))
        working.replace(done)
    except BaseException:
        # Removing a file works on a full disk too.
        working.unlink(missing_ok=True)
        raise


def _wait_for_parts(job: SaveJob) -> tuple[dict[str, WrittenFile], list[dict[str, Any]]]:
    """Wait until all ranks of this disk have written their parts.

    Returns:
        Pair of (written files by name, list with one summary per part of the sharded tensors in that part).

    Raises:
        CheckpointError: If a part could not be written, or was not written within `policy.timeout`.
    """
    files: dict[str, WrittenFile] = {}
    boxes = []
    deadline = time.monotonic() + job.policy.timeout
    for part in range(job.share.num_parts):
        done, working = job.staging / f".written-{part}", job.staging / f".writing-{part}"
        while not done.exists():
            if not working.exists() and not done.exists():
                raise CheckpointError(
                    f"part {part} of {job.share.num_parts} of {job.final} could not be written; the error of its rank names the "
                    "reason"
                )
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"part {part} of {job.share.num_parts} of {job.final} was not written in {job.policy.timeout:g} s"
                )
            time.sleep(folders.find_store(done).poll)
        told = json.loads(done.read_text())
        for name, num_bytes, digests, piece in told.pop("files"):
            files[name] = WrittenFile(name, num_bytes, tuple(digests), piece)
        boxes.append(told)
    for part in range(job.share.num_parts):
        (job.staging / f".written-{part}").unlink()
    return files, boxes


def _added_files(staging: Path, known: Mapping[str, WrittenFile]) -> dict[str, WrittenFile]:
    """Hash the files that hooks have added to the staging directory, flush them to the disk, and return them by name.

    Args:
        staging: Staging directory.
        known: Files that ranks have written, by name.
    """
    added = {}
    for path in sorted(staging.rglob("*")):
        name = path.relative_to(staging).as_posix()
        if path.is_dir():
            sync_folder(path)
        elif name not in known:
            added[name] = hash_file(path, name)
    return added


@pause_garbage_collection()
def _assemble_manifest(
    job: SaveJob,
    plan: Sequence[Mapping[str, Sequence[str]]],
    files: Mapping[str, WrittenFile],
    spread: Mapping[str, TensorEntry],
) -> Manifest:
    place = {name: file for part in plan for file, names in part.items() for name in names}
    tensors = {
        name: spread[name]
        if isinstance(tensor, ShardPiece)
        else TensorEntry(
            tuple(tensor.shape),
            get_dtype_name(tensor.dtype),
            (TensorChunk((0,) * tensor.ndim, tuple(tensor.shape), place[name], name),),
        )
        for name, tensor in job.content.tensors.items()
    }
    return Manifest(tensors, dict(sorted(files.items())), job.content.aliases, job.content.state, job.about)


def remove_staging(job: SaveJob) -> None:
    """Remove the staging directory of a failed save, on the rank that commits on this disk. Errors are ignored."""
    if job.share.leads:
        with suppress(OSError, ValueError, CheckpointError):  # ValueError: the name contains a NUL
            folders.find_store(job.staging).remove_staging()


class BackgroundSave:
    """Background thread that runs at most one save at a time."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._is_over = threading.Event()
        self._error: CheckpointError | None = None
        self._wait = SaveWait()
        self._guard = threading.Lock()
        self._is_writing = False
        self._at_end: list[Callable[[], None]] = []

    @property
    def is_busy(self) -> bool:
        """Whether a save is running."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, job: SaveJob) -> None:
        """Start a save on the background thread. `join` must have been called after the previous save."""

        def run() -> None:
            try:
                write(job, self._wait)
            except BaseException as error:  # kept for check(), which raises it in the training loop
                self._error = CheckpointError(
                    f"{job.final} could not be written in the background ({type(error).__name__}: {error}). Earlier checkpoints "
                    "are intact"
                )
                self._error.__cause__ = error
                remove_staging(job)
            finally:
                with self._guard:
                    self._is_writing = False
                    at_end, self._at_end = self._at_end, []
                try:
                    for act in at_end:
                        act()
                finally:
                    self._is_over.set()

        self._is_over.clear()
        self._is_writing = True
        self._thread = threading.Thread(target=run, name="headway-save", daemon=False)
        self._thread.start()

    def call_when_idle(self, act: Callable[[], None]) -> None:
        """Call a function now, or at the end of the running save on its thread.

        Args:
            act: Function to call. It should not raise an error.
        """
        with self._guard:
            if self._is_writing:
                self._at_end.append(act)
                return
        act()

    def join(self) -> None:
        """Wait for the running save, if there is one. If the save fails, keep its error for `check`."""
        if self._thread is not None:
            with self._wait.record_wait("joined"):
                # After Ctrl-C in Thread.join() Python regards the thread as ended, and does not wait for it at exit.
                self._is_over.wait()
                self._thread.join()
            self._thread = None

    def check(self) -> None:
        """Raise the error of a failed save. It is raised only once.

        Raises:
            CheckpointError: If the checkpoint could not be written.
        """
        error, self._error = self._error, None
        if error is not None:
            raise error
