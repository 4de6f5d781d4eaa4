"""Saving: every rank writes its part into the staging folder, one process a disk the manifest; in step or behind the loop.

The ranks of one disk speak through files in the staging folder, which works from a background thread, needs no
collective while the loop trains, and leaves nothing that a later save does not sweep::

    .writing-R   rank R is at work         (made while all ranks wait for each other)
    .written-R   its part is on the disk   (the former, renamed; says which files and hashes, and which boxes of what is spread)
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

from headway.checkpoint import folders
from headway.checkpoint.format.chunks import TensorChunk, file_of
from headway.checkpoint.format.manifest import Manifest, TensorEntry, WrittenFile
from headway.checkpoint.format.tensors import describe, prove_shard, write_shard
from headway.checkpoint.saving.snapshot import SavePoint, entries, own_part, pattern_of
from headway.checkpoint.state import CollectedState
from headway.checkpoint.stores.disk import sync_folder
from headway.errors import CheckpointError, ObjectStoreError
from headway.log import get_logger
from headway.runtime import pulse
from headway.runtime.events import notify
from headway.weights.pieces import ShardPiece
from headway.weights.shards import dtype_name

log = get_logger(__name__)


@dataclass(frozen=True)
class SavePolicy:
    """What is kept, and how a save runs.

    Attributes:
        keep: checkpoints that stay, this one included; None: all.
        protected: folders that stay whatever their age (e.g. the best one).
        owns_parent: the parent folder holds this run's checkpoints and nothing else.
        is_blocking: return when the checkpoint is on the disk; False: write behind the loop.
        timeout: seconds to wait for the other ranks' parts.
        is_alone: this rank saves, and no other knows of it: nothing is asked or told, and all of it is written here.
        steady: names of tensors that only an optimizer's step changes, which waits: they may be copied behind the loop.
        is_told: the log and whoever listens hear of it, and the file `latest` names it.
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
    """What this rank does on the disk that it writes to; all of it where nothing else is said.

    Attributes:
        part: which of the parts it writes; None: none.
        num_parts: parts on this disk.
        leads: does it commit there?
        is_own_disk: other machines have disks of their own, with checkpoints of their own.
    """

    part: int | None = 0
    num_parts: int = 1
    leads: bool = True
    is_own_disk: bool = False


@dataclass(frozen=True)
class SaveJob:
    """One save, as one rank sees it.

    Attributes:
        final: the checkpoint's folder.
        nonce: names the staging folder; alike on all ranks.
        share: what this rank writes.
        content: the run's state, in the same order on all ranks.
        about: for the manifest.
        policy: what is kept beside it.
        source: whose state it is, for who hears of the commit.
        arrivals: the content is complete when devices have come to these points; empty: it is.
        confirm: called when this rank's part is written; raises where what it was written from has changed meanwhile.
        spread: called after that, before the commit: brings the part elsewhere, and others here.
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
        """The tensors that this rank writes."""
        if self.share.part is None:
            return frozenset()
        files = plan_files(self.content.tensors, self.share.num_parts)[self.share.part]  # of what is whole
        return frozenset(name for names in files.values() for name in names)

    @property
    def staging(self) -> Path:
        """Where it is prepared."""
        return folders.store_of(self.final).staging(self.nonce)

    def rotate(self) -> None:
        """Remove older checkpoints of this run, now that this one is there."""
        if self.policy.keep is not None:
            folders.rotate(self.final.parent, self.policy.keep, self.policy.protected, self.about.get("run"))


def partition(sizes: Mapping[str, int], num_parts: int) -> list[list[str]]:
    """Names in order, cut into `num_parts` runs of about the same number of bytes."""
    total, done = sum(sizes.values()), 0
    parts: list[list[str]] = [[] for _ in range(num_parts)]
    for name, size in sizes.items():
        # By the middle of the tensor, so that no part is left out by rounding.
        index = min(num_parts - 1, (2 * done + size) * num_parts // (2 * total)) if total else 0
        parts[index].append(name)
        done += size
    return parts


def plan_files(tensors: Mapping[str, torch.Tensor | ShardPiece], num_parts: int) -> list[dict[str, list[str]]]:
    """For each part, its files and the names of whole tensors in each: files of weights hold nothing but weights."""
    plan: list[dict[str, list[str]]] = []
    sizes = {
        name: tensor.numel() * tensor.element_size()
        for name, tensor in tensors.items()
        if not isinstance(tensor, ShardPiece)
    }
    for index, names in enumerate(partition(sizes, num_parts)):
        files: dict[str, list[str]] = {}
        for name in names:
            files.setdefault(file_of(pattern_of(name), index), []).append(name)
        plan.append(files)
    return plan


def begin(job: SaveJob) -> None:
    """Make the staging folder ready; called on the main thread, after all ranks agreed on the job.

    Raises:
        OSError, CheckpointError: the folder cannot be written, or is none of ours.
    """
    if "\0" in str(job.final):
        raise CheckpointError(f"{str(job.final)!r} holds a NUL, which no name of a folder can; give another one")
    if job.share.leads:
        folders.store_of(job.final).check_target()
        job.final.parent.mkdir(parents=True, exist_ok=True)
        folders.store_of(job.final.parent).sweep(None if job.policy.owns_parent else job.final.name)
        job.staging.mkdir()


def announce(job: SaveJob) -> None:
    """Say that this rank will write; after `begin` has run on the leader."""
    if job.share.part is not None:
        (job.staging / f".writing-{job.share.part}").touch()


class SaveWait:
    """Tells the pulse while the main thread waits for other ranks' parts, by itself or by the thread that collects them.

    Who watches from outside sees neither a collective nor bytes then, and would take this rank for the one that is late.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now: set[str] = set()
        self._former: str | None = None

    @contextmanager
    def of(self, *what: str) -> Iterator[None]:
        """This thread waits: "joined", for the thread that writes; "collecting", its part is written, for those of the others."""
        is_main = threading.current_thread() is threading.main_thread()
        added = {*what, "joined"} if is_main else {*what}
        self._update(added, set())
        try:
            yield
        finally:
            self._update(set(), added)

    def _update(self, added: set[str], gone: set[str]) -> None:
        with self._lock:
            self._now = (self._now | added) - gone
            is_waiting, own = self._now == {"collecting", "joined"}, pulse.own()
            if is_waiting and self._former is None:
                self._former = own.read().phase
                own.set_phase(pulse.PARTS)
            elif not is_waiting and self._former is not None:
                own.set_phase(self._former)
                self._former = None


def write(job: SaveJob, wait: SaveWait | None = None) -> Manifest | None:
    """Write this rank's part, and on the leader commit; returns the manifest there.

    Args:
        job: what to write.
        wait: tells who waits for whom; None: one of its own.

    Raises:
        OSError: the disk is full or failed; the former checkpoint is intact.
        CheckpointError: another rank could not write its part.
    """
    plan = plan_files(job.content.tensors, job.share.num_parts)
    if job.share.part is not None:
        _write_part(job, plan[job.share.part])
    job.spread()
    if not job.share.leads:
        return None
    with (wait or SaveWait()).of("collecting"):
        files, told = _collect(job)
    files |= _added_files(job.staging, files)
    manifest = _assemble(job, plan, files, entries(job.content.tensors, told))
    # Read as a load will, before it replaces anything; what is kept in memory replaces nothing, and is compared when it is loaded.
    if job.policy.is_told and Manifest.decode(data := manifest.encode()).encode() != data:
        raise CheckpointError("the manifest would not come back as it is")
    folders.commit(job.staging, job.final, manifest)
    # It is committed: nothing that fails now may say otherwise.
    try:
        if job.policy.is_told:
            folders.store_of(job.final).point_latest()
    except (OSError, ValueError, ObjectStoreError) as error:
        log.warning_once("%s is saved, but the file 'latest' beside it could not be written: %s", job.final, error)
    try:
        if not job.share.is_own_disk:  # else that waits until every machine has committed
            job.rotate()
    except (OSError, ObjectStoreError) as error:
        log.warning_once("%s is saved, but older checkpoints could not be looked through: %s", job.final, error)
    if job.policy.is_told:
        step, num_bytes = job.about.get("num_updates"), manifest.num_bytes()
        notify("checkpoint", step=step, source=job.source, folder=str(job.final), bytes=num_bytes)
    return manifest


def _write_part(job: SaveJob, files: Mapping[str, Sequence[str]]) -> None:
    part = job.share.part
    working, done = job.staging / f".writing-{part}", job.staging / f".written-{part}"
    try:
        for arrival in job.arrivals:
            arrival.wait()
        (spread, told), written = own_part(job.content.tensors, part or 0), []
        parts = {file: [(name, job.content.tensors[name]) for name in names] for file, names in files.items()}
        for file, boxes in spread.items():
            parts.setdefault(file, []).extend(boxes)
        for file, tensors in parts.items():
            written.append(write_shard(job.staging / file, tensors, job.share.num_parts))
            prove_shard(job.staging / file, tensors)
        job.confirm()
        working.write_text(json.dumps({"files": [[w.name, w.num_bytes, w.digests, w.piece] for w in written], **told}))
        working.replace(done)
    except BaseException:
        # Taking a file away works on a full disk as well.
        working.unlink(missing_ok=True)
        raise


def _collect(job: SaveJob) -> tuple[dict[str, WrittenFile], list[dict[str, Any]]]:
    """The files of all parts, and what each part says of its boxes."""
    files: dict[str, WrittenFile] = {}
    boxes = []
    deadline = time.monotonic() + job.policy.timeout
    for part in range(job.share.num_parts):
        done, working = job.staging / f".written-{part}", job.staging / f".writing-{part}"
        while not done.exists():
            if not working.exists() and not done.exists():
                raise CheckpointError(
                    f"part {part} of {job.share.num_parts} of {job.final} could not be written; its rank says why"
                )
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"part {part} of {job.share.num_parts} of {job.final} was not written in {job.policy.timeout:g} s"
                )
            time.sleep(folders.store_of(done).poll)
        told = json.loads(done.read_text())
        for name, num_bytes, digests, piece in told.pop("files"):
            files[name] = WrittenFile(name, num_bytes, tuple(digests), piece)
        boxes.append(told)
    for part in range(job.share.num_parts):
        (job.staging / f".written-{part}").unlink()
    return files, boxes


def _added_files(staging: Path, known: Mapping[str, WrittenFile]) -> dict[str, WrittenFile]:
    """What hooks put into the folder belongs to the checkpoint too."""
    added = {}
    for path in sorted(staging.rglob("*")):
        name = path.relative_to(staging).as_posix()
        if path.is_dir():
            sync_folder(path)
        elif name not in known:
            added[name] = describe(path, name)
    return added


def _assemble(
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
            dtype_name(tensor.dtype),
            (TensorChunk((0,) * tensor.ndim, tuple(tensor.shape), place[name], name),),
        )
        for name, tensor in job.content.tensors.items()
    }
    return Manifest(tensors, dict(sorted(files.items())), job.content.aliases, job.content.state, job.about)


def abandon(job: SaveJob) -> None:
    """Remove the staging folder of a save that failed."""
    if job.share.leads:
        with suppress(OSError, ValueError, CheckpointError):  # the second one: of a name that no folder can have
            folders.store_of(job.staging).abandon()


class BackgroundSave:
    """At most one save behind the loop."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._is_over = threading.Event()
        self._error: CheckpointError | None = None
        self._wait = SaveWait()

    @property
    def is_busy(self) -> bool:
        """Is a save under way?"""
        return self._thread is not None and self._thread.is_alive()

    def start(self, job: SaveJob) -> None:
        """Write the job on a thread; `join` must have returned before."""

        def run() -> None:
            try:
                write(job, self._wait)
            except BaseException as error:  # handed to the loop, which raises it
                self._error = CheckpointError(
                    f"{job.final} could not be written behind the loop ({type(error).__name__}: {error}); earlier ones are intact"
                )
                self._error.__cause__ = error
                abandon(job)
            finally:
                self._is_over.set()

        self._is_over.clear()
        self._thread = threading.Thread(target=run, name="headway-save", daemon=False)
        self._thread.start()

    def join(self) -> None:
        """Wait for the save under way, and keep its error."""
        if self._thread is not None:
            with self._wait.of("joined"):
                # Ctrl-C in Thread.join() makes Python take the thread for one that has ended, and not wait for it at the exit.
                self._is_over.wait()
                self._thread.join()
            self._thread = None

    def check(self) -> None:
        """Raise the error of a save that failed meanwhile, once.

        Raises:
            CheckpointError: it could not be written.
        """
        error, self._error = self._error, None
        if error is not None:
            raise error
