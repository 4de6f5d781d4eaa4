"""Saving and finding checkpoints on all ranks together: who writes what, on shared folders or own disks.

Ranks agree before a byte is written and after the last one. Where machines share the folder, there is one checkpoint
to which all ranks contribute. Where each has a disk of its own, each keeps a complete replica, written by its own
ranks; such a checkpoint exists where the machines hold it with one manifest hash.

Hands a checkpoint on to machines with empty disks of their own: such as one that replaces a lost one.

Its files travel in bounded pieces from one machine that holds it, are forced to the disk, verified and committed there as in a save.
"""

import os
import secrets
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

from headway.checkpoint import folders
from headway.checkpoint.format.manifest import Manifest, read_manifest
from headway.checkpoint.loading.files import TargetLayout, read_state, verify
from headway.checkpoint.loading.reading import verify_share
from headway.checkpoint.saving import writer
from headway.checkpoint.saving.lock import Locks
from headway.checkpoint.saving.snapshot import HostCopies
from headway.checkpoint.state import ROWS, CollectedState, in_pieces
from headway.checkpoint.stores import objects
from headway.common import scope
from headway.common.object_path import ObjectPath, to_path
from headway.errors import CheckpointError
from headway.log import get_logger
from headway.runtime import process
from headway.runtime.collectives.checked import Collectives
from headway.runtime.process import ProcessRuntime
from headway.weights.pieces import is_spread

_PIECE = 16 * 2**20


def hand_on(
    folder: Path,
    holders: Sequence[bool],
    is_lead: bool,
    collectives: Collectives,
    files: Sequence[Collection[str]] | None = None,
) -> None:
    """Bring the checkpoint to the machines that lack it, or some of its files; every rank calls it.

    Args:
        folder: its folder, by the name it has on this rank's disk.
        holders: for each rank, whether its disk has it.
        is_lead: is this rank the one of its machine that writes?
        collectives: all ranks.
        files: for each rank, those of its files that are on that disk; None: a disk that has it has all of them.

    Raises:
        CheckpointError: on every rank, where it could not be read on the one side or written on the other.
    """
    source = holders.index(True)
    is_source = collectives.rank == source
    manifest: Manifest = collectives.broadcast_object(read_manifest(folder) if is_source else None, source)
    nonce = collectives.broadcast_object(secrets.token_hex(8), source)
    staging = folders.staging_folder(folder, nonce)
    held = [set(files[rank] if files else manifest.files) if has else set() for rank, has in enumerate(holders)]
    own = held[collectives.rank]
    is_receiver = is_lead and not (holders[collectives.rank] and own >= manifest.files.keys())
    failures: list[str] = []

    def attempt(act: Callable[..., Any], *given: Any) -> Any:
        """After a failure nothing more."""
        try:
            return None if failures else act(*given)
        except (OSError, CheckpointError) as error:
            failures.append(f"{type(error).__name__}: {error}")
            return None

    for name in own if is_receiver else ():
        attempt(_link, folder / name, staging / name)
    for name, written in manifest.files.items():
        has = [name in each for each in held]
        if all(has):
            continue
        source = has.index(True)
        is_source = collectives.rank == source
        pieces = _pieces(folder / name)
        for start in range(0, max(1, written.num_bytes), _PIECE):
            piece = collectives.broadcast_object(attempt(next, pieces, b"") or b"" if is_source else b"", source)
            if is_receiver and name not in own:
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


def _link(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    os.link(source, target)


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


log = get_logger(__name__)
_T = TypeVar("_T")


class Saver:
    """Saves and reads checkpoints of one Accelerator.

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
        self._verified: tuple[Path, str] | None = None
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
        locks, runtime = scope.own(Locks), self._runtime
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
            scope.own(Locks).release(parent)

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

    def largest(self, number: int) -> int:
        """The largest of all ranks' numbers: machines may not hold the same checkpoints."""
        return int(self._collectives.reduce_numbers([number], "max")[0])

    # ---------------------------------------------------------------- find and read

    def newest(self, parent: Path, run: str | None = None) -> tuple[Path | None, list[str]]:
        """The newest checkpoint in a folder that verifies, on every machine alike; and why newer ones do not.

        A machine whose disk holds none, as it came in the place of a lost one, is given the checkpoint by another.

        Args:
            parent: the folder that holds them.
            run: only those of this run count; None: all.

        Returns:
            (its folder or None, a line for each one passed over).

        Raises:
            CheckpointError: on every rank: it could not be brought to a machine without it.
        """
        reasons: list[str] = []
        everywhere = self._held(parent, run)
        holders = [bool(each) for each in everywhere]
        for name, _ in _common([each for each in everywhere if each]):
            problem = self._agreed_problem(parent / name, holders[self._runtime.rank], all(holders))
            if problem is None:
                if not all(holders):
                    hand_on(parent / name, holders, self._runtime.local_rank == 0, self._collectives)
                return parent / name, reasons
            reasons.append(problem)
        return None, reasons

    def _held(self, parent: Path, run: str | None) -> list[list[tuple[str, str]]]:
        """For each rank, (name, manifest hash) of the checkpoints on its disk, newest first."""
        own: list[tuple[str, str]] = []
        for folder in folders.originals(parent):
            if run is not None and folders.run_of(folder) not in (run, None):
                continue
            try:
                own.append((folder.name, read_manifest(folder).sha256))
            except CheckpointError as error:
                own.append((folder.name, f"damaged: {error}"))
        return self._collectives.gather_objects(own)

    def _agreed_problem(self, folder: Path, is_held: bool, is_everywhere: bool) -> str | None:
        """Why a checkpoint does not verify: one reader a machine, or, where it was written as shards, a share each."""
        problem: str | None = None
        try:
            manifest = read_manifest(folder) if is_held else None
            if isinstance(folder, ObjectPath):  # bytes are compared by who reads them, and read once
                is_asked = manifest is not None and self._runtime.rank == 0
                problem = objects.absent(folder, manifest) if manifest is not None and is_asked else None
                manifest = None
            is_shared = manifest is not None and any(len(each.chunks) > 1 for each in manifest.tensors.values())
            if manifest is not None and is_shared and is_everywhere:
                # Machines with copies of their own are covered by what each rank compares when it reads.
                verify_share(folder, manifest, self._runtime.rank, self._collectives.world_size)
            elif manifest is not None and self._runtime.local_rank == 0:
                self._verified = folder, verify(folder, manifest).sha256
        except CheckpointError as error:
            problem = str(error)
        found = [text for text in self._collectives.gather_objects(problem) if text is not None]
        return found[0] if found else None

    def read(self, path: Path, placing: TargetLayout | None = None) -> tuple[Manifest, CollectedState]:
        """A checkpoint's manifest and state, every byte compared with what was written; weights are views of its files.

        Args:
            path: its folder.
            placing: what is spread over the ranks here, of which each reads its part.

        Raises:
            CheckpointError: on every rank, where any finds it missing or damaged.
        """
        result: tuple[Manifest, CollectedState] | None = None
        failure: str | None = None
        try:
            folder = folders.locate(path)
            manifest = read_manifest(folder)
            is_known, self._verified = self._verified == (folder, manifest.sha256), None
            tensors, owned = read_state(folder, manifest, self._runtime.local_rank == 0 and not is_known, placing)
            result = manifest, CollectedState(tensors, dict(manifest.aliases), dict(manifest.state), owned)
        except CheckpointError as error:
            failure = str(error)
        told = self._collectives.gather_objects((failure, None if result is None else result[0].sha256))
        failures = {text for text, _ in told if text is not None}
        if failures:
            raise CheckpointError("; ".join(sorted(failures)))
        if len({each for _, each in told}) > 1:
            raise CheckpointError(f"{path} is not the same checkpoint on every rank (manifest hashes differ)")
        assert result is not None
        return result


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


def _common(everywhere: Sequence[Sequence[tuple[str, str]]]) -> list[tuple[str, str]]:
    """What all of the disks hold, in the order of the first; a damaged one is looked at, to say so."""
    first = everywhere[0] if everywhere else ()
    return [pair for pair in first if all(pair in each or pair[1].startswith("damaged") for each in everywhere)]
