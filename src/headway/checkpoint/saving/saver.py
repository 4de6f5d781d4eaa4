"""Saving checkpoints on all ranks together: who writes what, on shared folders or own disks.

Ranks agree before a byte is written and after the last one. Where machines share the folder, there is one checkpoint
to which all ranks contribute. Where each has a disk of its own, each keeps a complete replica, written by its own
ranks; such a checkpoint exists where the machines hold it with one manifest hash.
"""

import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

from headway.checkpoint import folders
from headway.checkpoint.format.manifest import read_manifest
from headway.checkpoint.saving import writer
from headway.checkpoint.saving.snapshot import HostCopies
from headway.checkpoint.state import ROWS, CollectedState, in_pieces
from headway.common import scope
from headway.common.object_path import to_path
from headway.errors import CheckpointError
from headway.log import get_logger
from headway.runtime import process
from headway.runtime.collectives.checked import Collectives
from headway.runtime.process import ProcessRuntime
from headway.weights.pieces import is_spread

log = get_logger(__name__)
_T = TypeVar("_T")


class Saver:
    """Saves checkpoints of one Accelerator.

    Args:
        runtime: this process.
        collectives: among all ranks.
        source: whose state it is, for who hears of each commit.
    """

    def __init__(self, runtime: ProcessRuntime, collectives: Collectives, source: object = None) -> None:
        self._source = source
        self._runtime = runtime
        self._collectives = collectives
        self._snapshot = HostCopies()
        self._background = writer.BackgroundSave()
        self._pending: writer.SaveJob | None = None
        self._alone = writer.BackgroundSave()

    # ---------------------------------------------------------------- save

    def hold(self, parent: Path, run: str | None, is_alone: bool = False) -> str:
        """Let no other run save into a folder; every rank calls it, or one alone.

        Args:
            parent: the folder that holds the checkpoints.
            run: the run's id; None: it has none yet.
            is_alone: the others do not.

        Returns:
            The run's id, the same on all ranks.

        Raises:
            CheckpointError: on every rank: another run has it.
        """
        locks, runtime = scope.own(folders.Locks), self._runtime
        process.at_end(locks.release)
        start = secrets.token_hex(8)
        own = run or start, locks.start_of(parent) or start
        if is_alone:
            locks.hold(parent, *own)
            return own[0]
        name = self._collectives.broadcast_object(own)
        leaders = [runtime.rank == 0]
        if self._collectives.world_size > runtime.local_world_size:
            leaders.append(runtime.local_rank == 0)  # on a folder that machines share, they find rank 0's lock
        for is_next in leaders:
            failure: str | None = None
            try:
                if is_next:
                    locks.hold(parent, *name)
            except CheckpointError as error:
                failure = str(error)
            failures = {text for text in self._collectives.gather_objects(failure) if text is not None}
            if failures:
                raise CheckpointError("; ".join(sorted(failures)))
        return str(name[0])

    def let_go(self, parent: Path) -> None:
        """Let others save into the folder, where nothing is being written."""
        if not self.is_busy:
            scope.own(folders.Locks).release(parent)

    def save(
        self,
        final: Path,
        collected: CollectedState,
        about: Mapping[str, Any],
        policy: writer.SavePolicy,
        fill: Callable[[Path], None] | None = None,
        seal: Callable[[], None] | None = None,
    ) -> None:
        """Write a checkpoint; every rank calls it with the same folder, or one alone (`policy.is_alone`).

        Args:
            final: the checkpoint's folder.
            collected: the state, in the same order on all ranks.
            about: for the manifest, alike on all ranks.
            policy: what is kept, and how it runs.
            fill: puts further files into the folder that it is given, or takes tensors out of `collected`, on every rank.
            seal: adds to `collected` what is taken last, after `fill`.

        Raises:
            CheckpointError: on every rank, where any of them could not write; the former checkpoint is intact.
        """
        is_alone = policy.is_alone
        self.wait(is_alone)
        nonce = secrets.token_hex(8)
        if not is_alone:
            nonce = self._collectives.broadcast_object(nonce)
        share = writer.DiskShare() if is_alone else self._find_share(final, nonce)
        if share.is_own_disk:
            _leave_rows_out(collected)
        _check_spread(collected, share, is_alone)
        job = writer.SaveJob(final, nonce, share, collected, about, policy, self._source)
        try:
            self._save(job, fill, seal)
        except BaseException:  # such as Ctrl-C while other ranks are waited for
            writer.abandon(job)
            raise

    def _save(self, job: writer.SaveJob, fill: Callable[[Path], None] | None, seal: Callable[[], None] | None) -> None:
        self._together(partial(writer.begin, job), job)
        if fill is not None:
            self._together(partial(folders.fill, fill, job.staging), job)

        def complete() -> CollectedState:
            if seal is not None:
                seal()
            return in_pieces(job.content)

        job = replace(job, content=self._together(complete, job))
        self._together(partial(writer.announce, job), job)
        if job.policy.is_blocking:
            self._together(partial(writer.write, job), job)
            if not job.policy.is_alone:
                self._after(job)
            return
        steady = job.policy.steady
        given = job.content.tensors, job.own_names
        taken = self._snapshot.overlap(*given, steady) if steady else self._snapshot.take(*given)
        job = replace(job, content=replace(job.content, tensors=taken.tensors), arrivals=taken.arrivals)
        if job.policy.is_alone:
            self._alone.start(job)
        else:
            self._pending = job
            self._background.start(job)

    def agree_on(self, folder: Path) -> Path:
        """Rank 0's folder, where ranks of one machine name different ones: often each has made a temporary one for itself.

        Ranks of several machines are taken at their word, as each machine may have a disk of its own.
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

    def _find_share(self, final: Path, nonce: str) -> writer.DiskShare:
        """Do all machines see the folder that rank 0 writes to? A file of an unforeseeable name tells."""
        runtime, world = self._runtime, self._collectives.world_size
        if world == runtime.local_world_size:
            return writer.DiskShare(runtime.rank, world, runtime.rank == 0)
        mark = final.parent / f".{nonce}"
        if runtime.rank == 0:
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.touch()
        self._collectives.barrier()
        sees = mark.exists()
        rows = self._collectives.gather_numbers([float(sees), float(runtime.local_world_size)])
        if runtime.rank == 0:
            mark.unlink(missing_ok=True)
        if all(row[0] for row in rows):
            return writer.DiskShare(runtime.rank, world, runtime.rank == 0)
        # The same parts on every machine, so that their manifests are the same.
        num_parts = int(min(row[1] for row in rows))
        part = runtime.local_rank if runtime.local_rank < num_parts else None
        return writer.DiskShare(part, num_parts, runtime.local_rank == 0, is_own_disk=True)

    def _together(self, act: Callable[[], _T], job: writer.SaveJob) -> _T:
        """Run on every rank, or on this one alone; where it fails on any, drop the save and raise on all."""
        result: _T | None = None
        failure: str | None = None
        cause: BaseException | None = None
        try:
            result = act()
        except Exception as error:  # such as a hook's: the other ranks must hear of it, and the folder must go
            failure, cause = f"{type(error).__name__}: {error}", error
        is_alone = job.policy.is_alone
        told = {self._runtime.rank: failure} if is_alone else dict(enumerate(self._collectives.gather_objects(failure)))
        failed = [f"rank {rank}: {text}" for rank, text in told.items() if text is not None]
        if failed:
            writer.abandon(job)
            raise CheckpointError(
                f"{job.final} was not saved; earlier checkpoints are as they were.\n  " + "\n  ".join(failed)
            ) from cause
        return cast(_T, result)

    def _after(self, job: writer.SaveJob) -> None:
        """On own disks: all machines must hold the same, and only then the old ones go."""
        if self._collectives.world_size == self._runtime.local_world_size:
            return
        own = read_manifest(job.final).sha256 if job.share.leads else None
        hashes = {each for each in self._collectives.gather_objects(own) if each is not None}
        if len(hashes) > 1:
            raise CheckpointError(
                f"{job.final} differs between machines, so it cannot be resumed from: the state of their ranks is not the same"
            )
        if job.share.is_own_disk and job.share.leads:
            job.rotate()

    def settle(self) -> None:
        """Before an optimizer's step: wait until a save behind the loop has copied what that changes."""
        self._snapshot.settle()

    def poll(self) -> None:
        """Raise the error of a save behind the loop, if there is one.

        Raises:
            CheckpointError: it could not be written.
        """
        self._background.check()
        self._alone.check()

    def wait(self, is_alone: bool = False) -> None:
        """Wait for the save behind the loop; every rank calls it.

        Args:
            is_alone: the others do not: what became of a save of all ranks is told when they come.

        Raises:
            CheckpointError: on every rank, where any could not write; on this one, where it could not, saving alone.
        """
        self._background.join()
        self._alone.join()
        self._alone.check()
        if self._pending is None or is_alone:
            return
        job, self._pending = self._pending, None
        self._together(self._background.check, job)
        self._after(job)

    @property
    def is_busy(self) -> bool:
        """Is a save being written behind the loop?"""
        return self._background.is_busy or self._alone.is_busy

    def is_agreed(self, answer: bool) -> bool:
        """Is it so on every rank?"""
        return self._collectives.reduce_numbers([float(answer)], "min")[0] > 0


def _leave_rows_out(collected: CollectedState) -> None:
    """Disks of their own must hold the same, and a machine knows no rows of other machines' ranks."""
    rows = [name for name in collected.tensors if name.startswith(ROWS)]
    for name in rows:
        del collected.tensors[name]
    if rows:
        log.warning_once(
            "local SGD on machines that do not share a folder: checkpoints hold the means over all ranks, not what each has of its "
            "own. Give a project_dir on storage that all machines share, and a resumed run goes on exactly"
        )


def _check_spread(collected: CollectedState, share: writer.DiskShare, is_alone: bool) -> None:
    """Refuse what cannot hold sharded state.

    Raises:
        CheckpointError: the other ranks' parts have no way to where this one writes.
    """
    name = next((name for name, value in collected.tensors.items() if is_spread(value)), None)
    if name is not None and is_alone:
        raise CheckpointError(
            f"{name} is sharded, but save_state was called on one rank only, which holds only a part: call it on every rank"
        )
    if name is not None and share.is_own_disk:
        raise CheckpointError(
            f"{name} is sharded across machines that do not share a folder: each would hold a part that no other can read. Give a "
            "project_dir on storage that all machines share, or a layout without sharding"
        )
