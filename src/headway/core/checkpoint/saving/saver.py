"""Save checkpoints on all ranks together, to a folder that machines share or to each machine's own disk.

Ranks exchange their errors before the first byte is written and after the last one. So a save succeeds on all ranks or
fails on all ranks. If machines share the folder, all ranks write to one checkpoint. If each machine has its own disk, each
disk gets a complete replica of the checkpoint, written by the ranks of that machine. Such a checkpoint is valid if the
manifests on all machines have equal hashes.
"""

import contextlib
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

from headway.common import scope
from headway.common.object_path import open_writable, to_path
from headway.core import extensions
from headway.core.checkpoint import folders
from headway.core.checkpoint.format.manifest import read_manifest
from headway.core.checkpoint.saving import writer
from headway.core.checkpoint.saving.background import BackgroundSave
from headway.core.checkpoint.saving.job import DiskShare, SaveJob, SavePolicy
from headway.core.checkpoint.saving.snapshot import HostCopies
from headway.core.checkpoint.state import ROWS, CollectedState, StatefulObjects, split_dtensors
from headway.core.checkpoint.stores.disk import warn_of_failed_removal
from headway.core.runtime import process
from headway.core.runtime.collectives.checked import Collectives
from headway.core.runtime.process import ProcessRuntime
from headway.core.weights.pieces import is_sharded
from headway.errors import CheckpointError, CollectiveError
from headway.log import get_logger

log = get_logger(__name__)
_T = TypeVar("_T")


class Saver:
    """Coordinator of one Accelerator's saves on all ranks.

    Args:
        runtime: Runtime of this process.
        collectives: Collectives over all ranks.
        source: Object that identifies the run, such as its update counter. It is passed to the listeners that are
            notified of each commit. Default: None, this process's run.
    """

    def __init__(self, runtime: ProcessRuntime, collectives: Collectives, source: object = None) -> None:
        self._source = source
        self._runtime = runtime
        self._collectives = collectives
        self._host_copies = HostCopies()
        self._joint_save = BackgroundSave()
        """Background save in which all ranks take part."""
        self._joint_job: SaveJob | None = None
        """Last job of `_joint_save` whose errors the ranks have not exchanged yet."""
        self._lone_save = BackgroundSave()
        """Background save of this rank alone."""
        self._folders_to_unlock: set[Path] = set()
        self._unlock_guard = threading.Lock()
        """Guard of `_folders_to_unlock`, which a background save changes when it ends."""

    # ---------------------------------------------------------------- save

    def lock_folder(self, parent: Path, run: str | None, is_alone: bool = False) -> str:
        """Lock a folder against saves of other runs. Every rank must call it unless `is_alone` is True.

        Rank 0 takes the lock, then the first rank of each other machine, whose disk might be a different one.

        Args:
            parent: Folder that holds the checkpoints.
            run: ID of the run. If all ranks call this method, rank 0's value counts. None: a new ID is chosen.
            is_alone: Whether only this rank calls it. Default: False.

        Returns:
            ID of the run, equal on all ranks that call this method.

        Raises:
            CheckpointError: On every rank that calls this method, if another run holds the lock.
        """
        locks, runtime = scope.get_or_create(folders.HeldLocks), self._runtime
        process.release_at_end(locks.release)
        with self._unlock_guard:
            self._folders_to_unlock.discard(parent)
        new_id = secrets.token_hex(8)
        run_id = run or new_id
        start_id = locks.get_start_id(parent) or new_id
        if is_alone:
            locks.lock_folder(parent, run_id, start_id)
            return run_id
        run_id, start_id = map(str, self._collectives.broadcast_object((run_id, start_id)))
        turns = [runtime.rank == 0]  # for each turn, whether this rank takes the lock in it
        if self._collectives.world_size > runtime.local_world_size:
            # On a shared folder, these ranks find rank 0's lock. It belongs to the same launch, so it covers them too.
            turns.append(runtime.local_rank == 0)
        for is_own_turn in turns:
            failure: str | None = None
            try:
                if is_own_turn:
                    locks.lock_folder(parent, run_id, start_id)
            except CheckpointError as error:
                failure = str(error)
            failures = {text for text in self._collectives.gather_objects(failure) if text is not None}
            if failures:
                raise CheckpointError("; ".join(sorted(failures)))
        locks.note_start_id(parent, start_id)
        return run_id

    def release_lock(self, parent: Path) -> None:
        """Release the lock of a folder. If a background save is running, the lock is released when the save ends.

        The lock is kept if `lock_folder` is called for the folder before the save ends.
        """
        locks = scope.get_or_create(folders.HeldLocks)
        with self._unlock_guard:
            self._folders_to_unlock.add(parent)

        def release_unless_locked_again() -> None:
            with self._unlock_guard:
                if parent in self._folders_to_unlock:
                    self._folders_to_unlock.discard(parent)
                    locks.release(parent)

        running = self._lone_save if self._lone_save.is_busy else self._joint_save  # only one of them can be running
        running.call_when_idle(release_unless_locked_again)

    def save(
        self,
        final: Path,
        collected: CollectedState,
        about: Mapping[str, Any],
        policy: SavePolicy,
        staging_hooks: Sequence[Callable[[Path], None]] = (),
        complete_state: Callable[[], None] | None = None,
    ) -> None:
        """Write a checkpoint. Every rank must call it with the same folder unless `policy.is_alone` is True.

        First wait for an earlier background save. Without `policy.is_blocking`, return once the state has been copied
        or its copies are scheduled. A later failure is raised by `raise_background_error`, `wait` or the next save.

        Args:
            final: Folder of the checkpoint.
            collected: State to save, in the same order on all ranks.
            about: The manifest's `about` section, the same on all ranks.
            policy: Options of the save: which checkpoints to keep, whether the save blocks, and others.
            staging_hooks: Hooks called with the staging directory on every rank. They may add files to it, or remove
                tensors from `collected`. After each hook, ranks exchange errors, because the next one may contain
                collectives. Default: (), no hooks.
            complete_state: Function called after the hooks, which adds the last parts of the state to `collected`, such
                as the RNG states that hooks may change. Default: None, nothing is added.

        Raises:
            CheckpointError: On every rank that saves, if any of them could not write, a hook has failed, or an earlier
                background save has failed. Also if a tensor is sharded, and only one rank saves or machines do not
                share the folder. An earlier checkpoint in the folder is intact.
        """
        is_alone = policy.is_alone
        self.wait(is_alone)
        nonce = secrets.token_hex(8)
        if not is_alone:
            nonce = self._collectives.broadcast_object(nonce)
        # This rank's share of the disk is not known yet, so an error up to here removes no staging directory.
        job = SaveJob(final, nonce, DiskShare(is_committer=False), collected, about, policy, self._source)
        share = DiskShare() if is_alone else self._find_share(job)
        if share.is_own_disk:
            _remove_rows(collected)
        _ensure_can_write_shards(collected, share, is_alone)
        job = replace(job, share=share)
        try:
            self._run_save(job, staging_hooks, complete_state)
        except BaseException:  # such as Ctrl-C while this rank waits for others
            writer.remove_staging(job)
            raise

    def _run_save(
        self,
        job: SaveJob,
        staging_hooks: Sequence[Callable[[Path], None]],
        complete_state: Callable[[], None] | None,
    ) -> None:
        """Write a checkpoint, or start to write it in the background.

        Each step runs on all ranks, which exchange their errors before the next one.

        Args:
            job: Save to run. Its folder and options are equal on all ranks.
            staging_hooks: Hooks called with the staging directory on every rank.
            complete_state: Function called after the hooks, which adds the last parts of the state. None: nothing is added.

        Raises:
            CheckpointError: On every rank that saves, if a step has failed on any of them.
        """
        self._run_on_all(partial(writer.create_staging, job), job)
        self._call_staging_hooks(job, staging_hooks)

        def complete_content() -> CollectedState:
            if complete_state is not None:
                complete_state()
            return split_dtensors(job.content)

        job = replace(job, content=self._run_on_all(complete_content, job))
        self._run_on_all(partial(writer.mark_as_writing, job), job)
        if job.policy.is_blocking:
            self._run_on_all(partial(writer.write_checkpoint, job), job)
            if not job.policy.is_alone:
                self._compare_commits(job)
            return
        tensors, deferrable_names = job.content.tensors, job.policy.deferrable_names
        if deferrable_names:
            snapshot = self._host_copies.copy_overlapped(tensors, job.own_names, deferrable_names)
        else:
            snapshot = self._host_copies.copy_tensors(tensors, job.own_names)
        content = replace(job.content, tensors=snapshot.tensors)
        job = replace(job, content=content, pending_copies=snapshot.pending_copies)
        if job.policy.is_alone:
            self._lone_save.start(job)
        else:
            self._joint_job = job
            self._joint_save.start(job)

    def _call_staging_hooks(self, job: SaveJob, hooks: Sequence[Callable[[Path], None]]) -> None:
        """Call the hooks that write additional files to the staging folder. Every rank must call it unless only one rank saves.

        Args:
            job: Save in progress.
            hooks: Functions of the staging folder. Their number can differ between ranks.

        Raises:
            CheckpointError: On every rank, if a hook fails on any rank.
        """
        # A script may register a hook on some ranks only. The other ranks must join the exchange of errors.
        counts = [[float(len(hooks))]]
        if not job.policy.is_alone:
            counts = self._collectives.gather_numbers(counts[0])
        num_hooks = int(max(counts)[0])
        if num_hooks:
            with contextlib.ExitStack() as stack:
                # In an object store, hooks share a temporary local folder, whose files are uploaded at the end.
                folder = self._run_on_all(lambda: stack.enter_context(open_writable(job.staging)), job)
                for hook in hooks:
                    self._run_on_all(partial(hook, folder), job)
                for _ in range(num_hooks - len(hooks)):
                    self._run_on_all(lambda: None, job)
                self._run_on_all(stack.close, job)

    def agree_on_folder(self, folder: Path) -> Path:
        """Return the folder to which this rank saves. Every rank must call it.

        If all ranks are on one machine, return rank 0's folder. The ranks might name different folders, for example if
        each rank has created a temporary one. A warning is then logged. In a run on several machines, return `folder`,
        because each machine might have its own disk.

        Args:
            folder: Folder that this rank names.
        """
        if not 1 < self._collectives.world_size == self._runtime.local_world_size:
            return folder
        chosen = to_path(self._collectives.broadcast_object(str(folder.absolute())))
        if chosen == folder.absolute():
            return folder
        log.warning_once(
            "save_state was given %s on rank %d and %s on rank 0: all ranks write to that of rank 0. Give every rank the same folder",
            folder,
            self._runtime.rank,
            chosen,
            main_process_only=False,
        )
        return chosen

    def _find_share(self, job: SaveJob) -> DiskShare:
        """Return which part of a checkpoint this rank writes, and whether it commits. Every rank must call it.

        In a run on several machines, this method finds out whether they share the folder. Rank 0 creates a file with a
        random name in it, and all ranks then look for that file.

        Args:
            job: Save whose folder and random name are equal on all ranks. Its share is not used.

        Raises:
            CheckpointError: On every rank, if any rank cannot create the file or look for it.
        """
        runtime, world = self._runtime, self._collectives.world_size
        if world == runtime.local_world_size:
            return DiskShare(runtime.rank, world, runtime.rank == 0)
        mark = job.final.parent / f".{job.nonce}"

        def create_mark() -> None:
            if runtime.rank == 0:
                mark.parent.mkdir(parents=True, exist_ok=True)
                mark.touch()

        self._run_on_all(create_mark, job)  # no rank looks for the file before rank 0 has created it
        try:
            sees_mark = self._run_on_all(mark.exists, job)
            answers = self._collectives.gather_numbers([float(sees_mark), float(runtime.local_world_size)])
        finally:
            if runtime.rank == 0:
                with warn_of_failed_removal(mark):
                    mark.unlink(missing_ok=True)
        if all(sees for sees, _ in answers):
            return DiskShare(runtime.rank, world, runtime.rank == 0)
        # All machines use the same number of parts, so that their manifests are equal.
        num_parts = int(min(local_size for _, local_size in answers))
        part = runtime.local_rank if runtime.local_rank < num_parts else None
        return DiskShare(part, num_parts, runtime.local_rank == 0, is_own_disk=True)

    def _run_on_all(self, action: Callable[[], _T], job: SaveJob) -> _T:
        """Run `action` on every rank, or only on this rank if it saves alone, and return this rank's result.

        If it fails on any rank, remove the staging directory and raise `CheckpointError` on all ranks.

        Args:
            action: Function to run.
            job: Save to which `action` belongs.

        Raises:
            CheckpointError: If `action` raises an `Exception` on any rank. Also if ranks are at different collectives,
                for example because `action` has failed on this rank, and contains a collective on another one.
        """
        result: _T | None = None
        failure: str | None = None
        cause: BaseException | None = None
        try:
            result = action()
        # Hooks can raise any error. All ranks must raise one, and the staging directory must be removed.
        except Exception as error:
            failure, cause = f"{type(error).__name__}: {error}", error
        failures = {self._runtime.rank: failure}
        # If all ranks have an error already, some of them raise it in this exchange. Another one would have no partner.
        is_exchanged = isinstance(cause, CollectiveError) and cause.is_on_all_ranks
        if not job.policy.is_alone and not is_exchanged:
            try:
                failures = dict(enumerate(self._collectives.gather_objects(failure)))
            except CollectiveError as error:
                failures[self._runtime.rank] = failure or str(error)
                cause = cause or error
        lines = [f"rank {rank}: {text}" for rank, text in failures.items() if text is not None]
        if lines:
            writer.remove_staging(job)
            raise CheckpointError(
                f"{job.final} was not saved; earlier checkpoints are unchanged.\n  " + "\n  ".join(lines)
            ) from cause
        return cast(_T, result)

    def _compare_commits(self, job: SaveJob) -> None:
        """Raise `CheckpointError` if machines have committed different manifests. Every rank must call it.

        If the manifests are equal and each machine has its own disk, remove old checkpoints from the disks. Do nothing
        if all ranks are on one machine.
        """
        if self._collectives.world_size == self._runtime.local_world_size:
            return
        own_hash = self._run_on_all(lambda: read_manifest(job.final).sha256 if job.share.is_committer else None, job)
        hashes = {each for each in self._collectives.gather_objects(own_hash) if each is not None}
        if len(hashes) > 1:
            raise CheckpointError(
                f"{job.final} differs between machines, so it cannot be resumed from: the state of their ranks is not the same"
            )
        if job.share.is_own_disk and job.share.is_committer:
            job.remove_old_checkpoints()

    def make_pinning_hook(self, list_objects: Callable[[], StatefulObjects]) -> Callable[[], None]:
        """Return a hook that pins host memory for the first background save. It must be called before each update.

        Its second call starts to pin the memory, because the first update creates the optimizer state.

        Args:
            list_objects: Function that returns the objects whose state the save will contain.
        """
        hook: Callable[[], None] = extensions.load("feature", "overlap_saves")(
            list_objects, self._collectives.world_size, self._host_copies.start_pinning
        )
        return hook

    def wait_for_copies(self) -> None:
        """Ensure that an optimizer step cannot affect the tensors that a background save is still copying.

        Copies between host tensors are completed. Devices wait for copies from them, but the host does not. It is
        called before each optimizer step.
        """
        self._host_copies.protect_copies()

    def raise_background_error(self) -> None:
        """Raise the error of a background save that has failed on this rank. Each error is raised only once.

        Raises:
            CheckpointError: If the checkpoint could not be written.
        """
        self._joint_save.raise_error()
        self._lone_save.raise_error()

    def wait(self, is_alone: bool = False) -> None:
        """Wait for the background save to finish. Every rank must call it unless `is_alone` is True.

        Args:
            is_alone: Whether only this rank calls it. If all ranks took part in the save, an error is then raised only
                by the next call that all ranks make. Default: False.

        Raises:
            CheckpointError: On every rank, if any rank could not write, or machines have committed different manifests.
                After a save of one rank, only on that rank.
        """
        self._joint_save.join()
        self._lone_save.join()
        self._lone_save.raise_error()
        if self._joint_job is None or is_alone:
            return
        job, self._joint_job = self._joint_job, None
        self._run_on_all(self._joint_save.raise_error, job)
        self._compare_commits(job)

    @property
    def is_busy(self) -> bool:
        """Whether a background save is running."""
        return self._joint_save.is_busy or self._lone_save.is_busy

    def is_true_on_all_ranks(self, value: bool) -> bool:
        """Whether `value` is True on every rank. Every rank must call it."""
        return self._collectives.reduce_numbers([float(value)], "min")[0] > 0


def _remove_rows(collected: CollectedState) -> None:
    """Remove tensors with one row per rank from a state that each machine saves to its own disk.

    Replicas on all disks must be equal, and a machine does not have the rows of the ranks on other machines.
    """
    rows = [name for name in collected.tensors if name.startswith(ROWS)]
    for name in rows:
        del collected.tensors[name]
    if rows:
        log.warning_once(
            "local SGD on machines that do not share a folder: checkpoints contain the means over all ranks, not the weights of "
            "each rank. For an exact resume, give a project_dir on storage that all machines share"
        )


def _ensure_can_write_shards(collected: CollectedState, share: DiskShare, is_alone: bool) -> None:
    """Raise an error if a tensor is sharded and not all ranks write to this disk.

    Args:
        collected: State to save.
        share: Part of the checkpoint that this rank writes.
        is_alone: Whether only this rank saves.

    Raises:
        CheckpointError: If a tensor is sharded, and either only one rank saves or each machine saves to its own disk.
    """
    name = next((name for name, value in collected.tensors.items() if is_sharded(value)), None)
    if name is not None and is_alone:
        raise CheckpointError(
            f"{name} is sharded, but save_state was called on one rank only, which has only a part of it. Call save_state on every "
            "rank"
        )
    if name is not None and share.is_own_disk:
        raise CheckpointError(
            f"{name} is sharded across machines that do not share a folder, so each would save a part that no other machine can "
            "read. Give a project_dir on storage that all machines share, or a layout without sharding"
        )
