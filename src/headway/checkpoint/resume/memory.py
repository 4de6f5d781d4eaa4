"""The last update in memory: checkpoints in a shared-memory folder that the launcher's agent holds, and that outlives the workers.

They are written as any other, beside the next forward and backward, from the tensors themselves: parameters and what optimizers
keep change in a step only, and each step waits for the commit. So a run that is started again by its agent has lost one update at
most. Ranks exchange one small message for each, of where they stand in their data and their RNG states.

The machines' folders are disks of their own: with whole models each holds all of it. Of sharded ones it holds its ranks' parts
and those of the machine before it (`NeighbourCopies`): ranks send what they have written on a gloo group of their own, behind the
loop, and every machine learns what all parts are. So each commits the same manifest, over its own files and its neighbour's. A
machine that comes in the place of a lost one is given what it lacks by the others.
"""

import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from headway.checkpoint import folders
from headway.checkpoint.format.foreign import number_of
from headway.checkpoint.format.manifest import MANIFEST, read_manifest
from headway.checkpoint.loading.reader import hand_on
from headway.checkpoint.loading.reading import read_files
from headway.checkpoint.resume.run import RunState
from headway.checkpoint.saving import writer
from headway.checkpoint.saving.place import CheckpointFolder
from headway.checkpoint.saving.snapshot import HostCopies
from headway.checkpoint.state import in_pieces
from headway.common import env
from headway.data.loader import PreparedLoader
from headway.errors import CheckpointError
from headway.log import get_logger
from headway.runtime.collectives.checked import Collectives
from headway.runtime.group import MARGIN, part
from headway.runtime.process import ProcessRuntime
from headway.training.hooks import StepHooks

log = get_logger(__name__)


class NeighbourCopies:
    """Exchanges parts; every rank makes it, on its main thread.

    Args:
        runtime: this process.
        machines: for each rank, which machine it is on, by any name.
    """

    def __init__(self, runtime: ProcessRuntime, machines: Sequence[str]) -> None:
        self._rank = runtime.rank
        order = list(dict.fromkeys(machines))
        ranks = [[rank for rank, name in enumerate(machines) if name == each] for each in order]
        here = order.index(machines[self._rank])
        before, after = ranks[here - 1], ranks[(here + 1) % len(order)]
        own = ranks[here]
        self._receiver = after[own.index(self._rank) % len(after)]
        self._senders = [rank for number, rank in enumerate(before) if own[number % len(own)] == self._rank]
        self._elsewhere = [rank for rank in range(len(machines)) if rank not in own]
        self._never_here = [rank for rank in self._elsewhere if rank not in before] if own[0] == self._rank else []
        self._group: Any = part(range(len(machines)), runtime.timeout + MARGIN)

    def announce(self, staging: Path) -> None:
        """Say, for the rank that commits on this machine, that the parts of other machines will come."""
        for rank in self._elsewhere:
            (staging / f".writing-{rank}").touch()

    def exchange(self, staging: Path) -> None:
        """Send this rank's part, and take those that come here; every rank calls it when its own is written.

        Raises:
            OSError, RuntimeError: a machine is gone, or the memory full.
        """
        told: list[str] = [""] * dist.get_world_size(self._group)
        try:
            dist.all_gather_object(told, (staging / f".written-{self._rank}").read_text(), group=self._group)
            work = [
                dist.isend(_mapped(staging / name, size), self._receiver, group=self._group)
                for name, size, *_ in json.loads(told[self._rank])["files"]
            ]
            received = []  # the memory must live as long as the transfer
            for rank in self._senders:
                for name, size, *_ in json.loads(told[rank])["files"]:
                    received.append(_mapped(staging / name, size))
                    work.append(dist.irecv(received[-1], rank, group=self._group))
            for each in work:
                if each is not None:
                    each.wait()
        except BaseException:
            for rank in self._senders:  # who commits need not wait for them
                (staging / f".writing-{rank}").unlink(missing_ok=True)
            raise
        for rank in (*self._senders, *self._never_here):
            working = staging / f".writing-{rank}"
            working.write_text(told[rank])
            os.replace(working, staging / f".written-{rank}")


def _mapped(path: Path, size: int) -> torch.Tensor:
    """The bytes of a file, which is made where it is not there."""
    return torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)


_KEPT = 2
"""The last one, and the one before, which is whole while the last one is written."""
_POLL = 0.0005
_OWN = ("loaders", "streams")
"""What each rank has of its own."""


@dataclass(frozen=True)
class _Copy:
    """What one machine holds of a state: the manifest's hash, the files that belong to it, and those that are there."""

    sha256: str
    files: frozenset[str]
    held: frozenset[str]


class MemoryTier:
    """Keeps a run's last update in the memory of its machines.

    Args:
        run_state: the run.
        collectives: among all ranks.
        place: of the checkpoints on the disk.
        moments: of the training step.
    """

    def __init__(
        self, run_state: RunState, collectives: Collectives, place: CheckpointFolder, moments: StepHooks
    ) -> None:
        self._run = run_state
        self._collectives = collectives
        self._place = place
        self._share: writer.DiskShare | None = None
        self._folder = Path()
        self._is_off = False
        self._number, self._nonce, self._last = 0, "", 0
        self._background, self._copies = writer.BackgroundSave(), HostCopies()
        self._job: writer.SaveJob | None = None
        self._neighbours: NeighbourCopies | None = None
        self._failure: str | None = None
        run_state.before_batches.append(self._before_batch)
        moments.before_begin.append(self._before_begin)
        moments.before_update.append(self.settle)

    # ---------------------------------------------------------------- after an update

    def _before_batch(self, loader: PreparedLoader) -> None:
        self._keep()

    def _before_begin(self) -> None:
        if self._run.is_without_loader:
            self._keep()

    def _keep(self) -> None:
        """Begin to keep the state between two windows, where an update has been made since the last time."""
        run = self._run
        update = run.clock.num_updates
        if self._is_off or update == self._last or update % self._place.project.keep_in_memory:
            return
        if run.windows.is_unfinished or run.local.has_parted or any(run.local.steps()):
            return  # what local SGD has of each rank travels only at its own pace
        self.settle()
        self._last = update
        if not self._is_open():
            return
        job, own = None, None
        try:
            job, own = self._prepare()
        except Exception as error:  # the other ranks must hear of it
            self._failure = f"{type(error).__name__}: {error}"
        told = self._collectives.gather_objects((self._failure, own))
        failed = [f"rank {rank}: {failure}" for rank, (failure, _) in enumerate(told) if failure is not None]
        if failed or job is None:
            self._end("; ".join(failed), job)
            return
        self._start(job, [own for _, own in told])

    def _prepare(self) -> tuple[writer.SaveJob, Any]:
        """This rank's part, and what the others must know of it; where it will be written is told to the others of the machine."""
        assert self._share is not None
        collected, about = self._run.collect_own()
        names = tuple(f"{kind}/{self._collectives.rank}" for kind in _OWN)
        tensors = {
            name: collected.tensors.pop(name).clone() for name in list(collected.tensors) if name.startswith(names)
        }
        states = [collected.state.pop(kind)[0] for kind in _OWN]
        final = self._folder / f"update_{self._number}"
        about |= {"name": final.name, "iteration": self._place.iteration}
        policy = writer.SavePolicy(_KEPT, owns_parent=True, is_blocking=False, is_told=False)
        job = writer.SaveJob(final, f"{self._nonce}{self._number:08x}", self._share, collected, about, policy)
        job.staging.mkdir(exist_ok=True)
        if self._neighbours is not None:
            self._neighbours.announce(job.staging)
        writer.announce(job)
        self._number += 1
        return job, (states, tensors, about)

    def _start(self, job: writer.SaveJob, told: Sequence[Any]) -> None:
        content, run = job.content, self._run
        for number, kind in enumerate(_OWN):
            content.state[kind] = [states[number] for states, _, _ in told]
        for _, tensors, _ in told:
            content.tensors.update(tensors)
        if not self._place.project.save_frozen:
            run.leave_frozen_out(content)
        steady = run.steady(content)
        try:
            content = in_pieces(content)
            job = replace(job, content=content, about=told[0][2])
            taken = self._copies.take(content.tensors, job.own_names, steady)
        except (CheckpointError, RuntimeError) as error:  # told at the next update
            self._failure = f"{type(error).__name__}: {error}"
            (job.staging / f".writing-{job.share.part}").unlink(missing_ok=True)
            return
        self._job = replace(
            job,
            content=replace(content, tensors=taken.tensors),
            arrivals=taken.arrivals,
            confirm=taken.steady.confirm,
            spread=partial(self._neighbours.exchange, job.staging) if self._neighbours is not None else lambda: None,
        )
        self._background.start(self._job)

    def settle(self) -> None:
        """Wait until what is being kept is whole on this machine: before anything changes the state."""
        job, self._job = self._job, None
        if job is None:
            return
        self._background.join()
        try:
            self._background.check()
            # The rank that commits takes the staging folder away, by giving it its name or as what could not be written.
            while not (job.final / MANIFEST).exists() and job.staging.exists():
                time.sleep(_POLL)
        except CheckpointError as error:
            self._failure = str(error)

    def _end(self, why: str, job: writer.SaveJob | None) -> None:
        """Keep nothing more, on all ranks."""
        self._is_off = True
        if job is not None:
            writer.abandon(job)
        if self._share is not None and self._share.leads:
            shutil.rmtree(self._folder, ignore_errors=True)
        log.warning(
            "keep_in_memory stops, because an update could not be kept (%s); checkpoints on the disk are not affected",
            why or "no shared memory",
        )

    # ---------------------------------------------------------------- the folder

    def _is_open(self) -> bool:
        """Find out, once, which ranks share a machine's memory; every rank calls it."""
        if self._share is not None or self._is_off:
            return not self._is_off
        held = env.get(env.MEMORY)
        if held:
            # Several Accelerators of one process have a folder each.
            self._folder = Path(held) / hashlib.sha256(str(self._place.parent()).encode()).hexdigest()[:16]
            self._folder.mkdir(exist_ok=True)
        newest = max((number_of(path) or 0 for path in self._kept()), default=0)
        told = self._collectives.gather_objects((held or "", newest, secrets.token_hex(4)))
        groups = [group for group, _, _ in told]
        self._number, self._nonce = 1 + max(number for _, number, _ in told), told[0][2]
        if not all(groups):
            self._is_off = True
            log.warning(
                "keep_in_memory has no effect: it needs shared memory (/dev/shm) of the agent that `headway launch` runs for several "
                "processes, and this process was not started by one"
            )
            return False
        own = groups[self._collectives.rank]
        place = groups[: self._collectives.rank].count(own)
        fewest = min(groups.count(group) for group in groups)
        self._share = writer.DiskShare(place if place < fewest else None, fewest, place == 0)
        if len(set(groups)) > 1 and self._run.is_sharded:
            self._share = writer.DiskShare(self._collectives.rank, len(groups), place == 0)
            self._neighbours = NeighbourCopies(self._run.runtime, groups)
        if place == 0:
            folders.store_of(self._folder).sweep()
        self._collectives.barrier()
        return True

    def _kept(self) -> list[Path]:
        return folders.committed(self._folder) if self._folder.name else []

    # ---------------------------------------------------------------- after a restart

    def newest(self) -> Path | None:
        """The newest state in memory that verifies, brought to every machine; None where there is none. Every rank calls it."""
        if not self._is_open() or self._share is None:
            return None
        told = self._collectives.gather_objects((env.get(env.MEMORY), self._verified() if self._share.leads else None))
        leaders = {machine: own for machine, own in told if own is not None}
        on_rank: list[dict[str, _Copy]] = [leaders[machine] for machine, _ in told]
        found = {name: number_of(Path(name)) or 0 for own in on_rank for name in own}
        for name in sorted(found, key=lambda each: -found[each]):
            copies = [own.get(name) for own in on_rank]
            there = [each for each in copies if each is not None]
            if len({each.sha256 for each in there}) > 1:
                log.warning("%s in memory is skipped: machines have kept different states under that name", name)
            elif missing := there[0].files.difference(*(each.held for each in there)):
                log.warning("%s in memory is skipped: no machine holds %s", name, ", ".join(sorted(missing)[:3]))
            else:
                if any(each is None or each.held != each.files for each in copies):
                    holders = [each is not None for each in copies]
                    files = [each.held if each else () for each in copies]
                    hand_on(self._folder / name, holders, self._share.leads, self._collectives, files)
                return self._folder / name
        return None

    def _verified(self) -> "dict[str, _Copy]":
        """By name, what this machine has kept, and every byte of which is as it was written."""
        found = {}
        for folder in self._kept():
            try:
                manifest = read_manifest(folder)
                here = [each for each in manifest.files.values() if (folder / each.name).exists()]
                read_files(folder, here)
                found[folder.name] = _Copy(
                    manifest.sha256, frozenset(manifest.files), frozenset(each.name for each in here)
                )
            except CheckpointError as error:
                log.warning("a state in memory is skipped: %s", error, main_process_only=False)
                with suppress(OSError):
                    folders.store_of(folder).remove()
        return found

    def is_newer(self, kept: Path, on_disk: Path | None) -> bool:
        """Was it kept after that checkpoint was saved?"""
        return on_disk is None or (number_of(on_disk) or 0) < int(read_manifest(kept).about["iteration"])

    def holds(self, folder: Path) -> bool:
        """Does it lie in memory?"""
        return bool(self._folder.name) and folder.parent == self._folder
