"""In-memory checkpoints in the launch agent's shared-memory folder, which outlives the worker processes.

They are written like other checkpoints, during the next forward and backward, directly from the tensors. Parameters
and optimizer states change only in an optimizer step, and each step waits until the checkpoint is committed. So if a
checkpoint is made after every update, a run that the agent restarts loses at most one update. For each checkpoint, the
ranks exchange one small message with their data positions and RNG states.

Each machine's folder is treated like a separate disk. With replicated models each machine stores everything. With
sharded models a machine stores the files of its own ranks and of the machine before it (`NeighborCopies`). Ranks send
their files on a separate gloo group in the background, and every machine gets the list of all files. So all machines
commit the same manifest, although each has only its own files and its neighbor's. A machine that replaces a lost one
receives the missing files from the others.
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
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from headway.common import env
from headway.core.checkpoint import folders
from headway.core.checkpoint.format.foreign import parse_number
from headway.core.checkpoint.format.manifest import MANIFEST, read_manifest
from headway.core.checkpoint.loading.reader import copy_to_machines
from headway.core.checkpoint.loading.reading import read_files
from headway.core.checkpoint.resume.state import CheckpointState
from headway.core.checkpoint.saving import writer
from headway.core.checkpoint.saving.checkpoint_folder import CheckpointFolder
from headway.core.checkpoint.saving.snapshot import HostCopies
from headway.core.checkpoint.state import split_dtensors
from headway.core.data.loader import PreparedLoader
from headway.core.runtime.collectives.checked import Collectives
from headway.core.runtime.group import MARGIN, create_group
from headway.core.runtime.process import ProcessRuntime
from headway.core.training.hooks import StepHooks
from headway.errors import CheckpointError
from headway.extras.moving_average import holds_averages
from headway.log import get_logger

log = get_logger(__name__)


class NeighborCopies:
    """Transfer of in-memory checkpoint files between machines, so that the files of a lost machine still exist.

    Each machine sends its files to the next one. Every rank must create this object, on its main thread.

    Args:
        runtime: Runtime of this process.
        machines: Machine name of each rank.
    """

    def __init__(self, runtime: ProcessRuntime, machines: Sequence[str]) -> None:
        self._rank = runtime.rank
        names = list(dict.fromkeys(machines))
        ranks_by_machine = [[rank for rank, name in enumerate(machines) if name == each] for each in names]
        index = names.index(machines[self._rank])
        own_ranks = ranks_by_machine[index]
        previous_ranks = ranks_by_machine[index - 1]
        next_ranks = ranks_by_machine[(index + 1) % len(names)]
        # Machines can have different numbers of ranks, so a rank can have several senders, or none.
        self._receiver = next_ranks[own_ranks.index(self._rank) % len(next_ranks)]
        self._senders = [
            rank for number, rank in enumerate(previous_ranks) if own_ranks[number % len(own_ranks)] == self._rank
        ]
        self._remote_ranks = [rank for rank in range(len(machines)) if rank not in own_ranks]
        # One rank per machine also writes the file lists of the ranks whose files this machine does not get.
        is_first = own_ranks[0] == self._rank
        self._list_only_ranks = [rank for rank in self._remote_ranks if is_first and rank not in previous_ranks]
        self._group: Any = create_group(range(len(machines)), runtime.timeout + MARGIN)

    def announce(self, staging: Path) -> None:
        """Create a marker file for each rank on another machine, before the checkpoint's files are exchanged.

        The rank that commits this machine's checkpoint waits until `exchange` has replaced each marker with the list of
        files that the rank has written.

        Args:
            staging: Staging directory of the save.
        """
        for rank in self._remote_ranks:
            (staging / f".writing-{rank}").touch()

    def exchange(self, staging: Path) -> None:
        """Send this rank's checkpoint files to the next machine, and receive files from the previous machine.

        Each machine also gets the lists of the files that all ranks have written.

        Every rank must call it, after it has written its own files.

        Args:
            staging: Staging directory of the save.

        Raises:
            OSError, RuntimeError: If a machine is lost, or the memory is full.
        """
        file_lists: list[str] = [""] * dist.get_world_size(self._group)
        try:
            dist.all_gather_object(file_lists, (staging / f".written-{self._rank}").read_text(), group=self._group)
            work = [
                dist.isend(_map_file(staging / name, size), self._receiver, group=self._group)
                for name, size, *_ in json.loads(file_lists[self._rank])["files"]
            ]
            buffers = []  # the memory must live as long as the transfer
            for rank in self._senders:
                for name, size, *_ in json.loads(file_lists[rank])["files"]:
                    buffer = _map_file(staging / name, size)
                    buffers.append(buffer)
                    work.append(dist.irecv(buffer, rank, group=self._group))
            for each in work:
                if each is not None:
                    each.wait()
        except BaseException:
            for rank in self._senders:  # so that the committing rank does not wait for them
                (staging / f".writing-{rank}").unlink(missing_ok=True)
            raise
        for rank in (*self._senders, *self._list_only_ranks):
            marker = staging / f".writing-{rank}"
            marker.write_text(file_lists[rank])
            os.replace(marker, staging / f".written-{rank}")


def _map_file(path: Path, size: int) -> torch.Tensor:
    """Return a uint8 tensor of shape [size] that is mapped to the first bytes of a file. Writes change the file.

    The file is created if it is missing, and extended if it is shorter than `size` bytes.
    """
    return torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)


_NUM_KEPT = 2
"""Number of in-memory checkpoints that are kept: the last one, and the one before it.

The earlier one is needed if the last one is incomplete.
"""
_POLL_SECONDS = 0.0005
_RANK_KINDS = ("loaders", "streams")
"""Keys of the states that differ between ranks: data positions and RNG states. Each rank saves its own."""


class _SentState(NamedTuple):
    """Part of a checkpoint that each rank sends to all others.

    Attributes:
        states: States of this rank, in the order of `_RANK_KINDS`.
        tensors: Tensors in these states, by logical name.
        about: The manifest's `about` section.
    """

    states: list[Any]
    tensors: dict[str, torch.Tensor]
    about: dict[str, Any]


@dataclass(frozen=True)
class _LocalFiles:
    """Files of an in-memory checkpoint that are on this machine.

    Attributes:
        sha256: Hash of the manifest.
        all_names: Names of all files of the checkpoint.
        local_names: Names of the files that this machine has.
    """

    sha256: str
    all_names: frozenset[str]
    local_names: frozenset[str]


class MemoryTier:
    """Manager of a run's in-memory checkpoints. After updates, they are saved in each machine's shared memory.

    Args:
        state: State of the run that checkpoints contain.
        collectives: Collectives over all ranks.
        place: Folder of the checkpoints on the disk.
        step_hooks: Hooks of the training step.
    """

    def __init__(
        self, state: CheckpointState, collectives: Collectives, place: CheckpointFolder, step_hooks: StepHooks
    ) -> None:
        self._state = state
        self._collectives = collectives
        self._place = place
        # Set by the first call of `_can_save`.
        self._share: writer.DiskShare | None = None
        self._folder = Path()
        self._next_number = 0
        self._nonce = ""
        self._neighbors: NeighborCopies | None = None
        self._is_disabled = False
        self._last_update = 0
        self._background = writer.BackgroundSave()
        self._copies = HostCopies()
        self._job: writer.SaveJob | None = None
        self._failure: str | None = None  # of an earlier save; reported to the other ranks at the next one
        state.progress.before_training_batch.append(self._before_batch)
        step_hooks.before_micro_batch.append(self._before_micro_batch)
        step_hooks.before_update.append(self.finish_save)
        step_hooks.before_swap.append(self.finish_save)

    # ---------------------------------------------------------------- after an update

    def _before_batch(self, loader: PreparedLoader) -> None:
        self._save_if_due()

    def _before_micro_batch(self) -> None:
        if self._state.progress.is_without_loader:
            self._save_if_due()

    def _save_if_due(self) -> None:
        """Start an in-memory checkpoint if one is due: at each update whose number is a multiple of `keep_in_memory`.

        Do nothing inside an accumulation window, inside a block of local SGD, and while a model contains averaged weights.
        """
        state = self._state
        update = state.run.clock.num_updates
        if self._is_disabled or update == self._last_update or update % self._place.project.keep_in_memory:
            return
        if state.run.windows.is_unfinished or state.local.has_diverged or any(state.local.list_steps()):
            return  # local SGD exchanges state only at the end of its blocks
        if holds_averages(state.run):  # an evaluation: the next batch of the training saves the trained weights
            return
        self.finish_save()
        self._last_update = update
        if not self._can_save():
            return
        job, rank_state = None, None
        try:
            job, rank_state = self._prepare_job()
        except Exception as error:  # all ranks must stop together
            self._failure = f"{type(error).__name__}: {error}"
        reports = self._collectives.gather_objects((self._failure, rank_state))
        failures = [f"rank {rank}: {failure}" for rank, (failure, _) in enumerate(reports) if failure is not None]
        if failures or job is None:
            self._stop_saving("; ".join(failures), job)
            return
        self._start_job(job, [rank_state for _, rank_state in reports])

    def _prepare_job(self) -> tuple[writer.SaveJob, _SentState]:
        """Create this rank's save job, and a marker file that shows the ranks of this machine that it will write.

        Returns:
            The save job, and this rank's own states, which the other ranks need. The job does not contain them.
        """
        assert self._share is not None
        collected, about = self._state.collector.collect_own()
        names = tuple(f"{kind}/{self._collectives.rank}" for kind in _RANK_KINDS)
        tensors = {
            name: collected.tensors.pop(name).clone() for name in list(collected.tensors) if name.startswith(names)
        }
        states = [collected.state.pop(kind)[0] for kind in _RANK_KINDS]
        final = self._folder / f"update_{self._next_number}"
        about |= {"name": final.name, "iteration": self._place.iteration}
        policy = writer.SavePolicy(_NUM_KEPT, owns_parent=True, is_blocking=False, is_published=False)
        job = writer.SaveJob(final, f"{self._nonce}{self._next_number:08x}", self._share, collected, about, policy)
        job.staging.mkdir(exist_ok=True)
        if self._neighbors is not None:
            self._neighbors.announce(job.staging)
        writer.mark_as_writing(job)
        self._next_number += 1
        return job, _SentState(states, tensors, about)

    def _start_job(self, job: writer.SaveJob, rank_states: Sequence[_SentState]) -> None:
        """Start to copy the tensors of a save job to host memory, and to write them in the background.

        A failure is not raised, but reported when the next checkpoint is due.

        Args:
            job: Save job of this rank.
            rank_states: States of every rank, which are added to the checkpoint.
        """
        content = job.content
        state = self._state
        for number, kind in enumerate(_RANK_KINDS):
            content.state[kind] = [each.states[number] for each in rank_states]
        for each in rank_states:
            content.tensors.update(each.tensors)
        if not self._place.project.save_frozen:
            state.collector.replace_frozen_weights(content)
        constant_names = state.collector.list_step_tensors(content)
        try:
            content = split_dtensors(content)
            job = replace(job, content=content, about=rank_states[0].about)
            snapshot = self._copies.copy_tensors(content.tensors, job.own_names, constant_names)
        except (CheckpointError, RuntimeError) as error:  # reported at the next update
            self._failure = f"{type(error).__name__}: {error}"
            (job.staging / f".writing-{job.share.part}").unlink(missing_ok=True)
            return
        self._job = replace(
            job,
            content=replace(content, tensors=snapshot.tensors),
            pending_copies=snapshot.pending_copies,
            check_sources=snapshot.uncopied_versions.ensure_unchanged,
            exchange_parts=partial(self._neighbors.exchange, job.staging)
            if self._neighbors is not None
            else lambda: None,
        )
        self._background.start(self._job)

    def finish_save(self) -> None:
        """Wait until the in-memory checkpoint in progress, if there is one, is complete on this machine.

        Must be called before parameters or other saved state are changed. A failure of the save is not raised. When the
        next in-memory checkpoint is due, all ranks stop saving such checkpoints because of it.
        """
        job, self._job = self._job, None
        if job is None:
            return
        self._background.join()
        try:
            self._background.raise_error()
            # The committing rank removes the staging directory: it renames it, or deletes it after a failure.
            while not (job.final / MANIFEST).exists() and job.staging.exists():
                time.sleep(_POLL_SECONDS)
        except CheckpointError as error:
            self._failure = str(error)

    def _stop_saving(self, reason: str, job: writer.SaveJob | None) -> None:
        """Disable in-memory checkpoints on all ranks, and log a warning.

        Args:
            reason: Reason, for the warning. Empty: there is no shared memory.
            job: Save job to abandon, or None.
        """
        self._is_disabled = True
        if job is not None:
            writer.remove_staging(job)
        if self._share is not None and self._share.is_committer:
            shutil.rmtree(self._folder, ignore_errors=True)
        log.warning(
            "keep_in_memory stops, because an update could not be kept (%s); checkpoints on the disk are not affected",
            reason or "no shared memory",
        )

    # ---------------------------------------------------------------- the folder

    def _can_save(self) -> bool:
        """Whether in-memory checkpoints are possible.

        The first call also finds out which ranks are on one machine, so every rank must call it.
        """
        if self._share is not None or self._is_disabled:
            return not self._is_disabled
        memory_folder = env.get(env.MEMORY)
        if memory_folder:
            # Each Accelerator of a process has its own folder.
            self._folder = Path(memory_folder) / hashlib.sha256(str(self._place.get_parent()).encode()).hexdigest()[:16]
            self._folder.mkdir(exist_ok=True)
        newest = max((parse_number(path) or 0 for path in self._list_committed()), default=0)
        answers = self._collectives.gather_objects((memory_folder or "", newest, secrets.token_hex(4)))
        self._next_number = 1 + max(number for _, number, _ in answers)
        _, _, self._nonce = answers[0]
        # Ranks with the same folder of shared memory are on one machine.
        machines = [folder for folder, _, _ in answers]
        if not all(machines):
            self._is_disabled = True
            log.warning(
                "keep_in_memory has no effect: it needs shared memory (/dev/shm) of the agent that `headway launch` runs for several "
                "processes, and this process was not started by one"
            )
            return False
        rank = self._collectives.rank
        local_rank = machines[:rank].count(machines[rank])
        is_leader = local_rank == 0
        if len(set(machines)) > 1 and self._state.objects.is_sharded:
            self._share = writer.DiskShare(rank, len(machines), is_leader)
            self._neighbors = NeighborCopies(self._state.run.runtime, machines)
        else:
            # Each machine stores everything. All of them must split it in the same way, to commit the same manifest.
            num_parts = min(machines.count(machine) for machine in machines)
            self._share = writer.DiskShare(local_rank if local_rank < num_parts else None, num_parts, is_leader)
        if is_leader:
            folders.find_store(self._folder).remove_leftovers()
        self._collectives.barrier()
        return True

    def _list_committed(self) -> list[Path]:
        """Return the committed checkpoints in shared memory, newest first."""
        return folders.list_committed(self._folder) if self._folder.name else []

    # ---------------------------------------------------------------- after a restart

    def find_newest(self) -> Path | None:
        """Copy the newest valid in-memory checkpoint to every machine. Return its folder, or None if there is none.

        Every rank must call it.
        """
        if not self._can_save() or self._share is None:
            return None
        answers = self._collectives.gather_objects(
            (env.get(env.MEMORY), self._verify_copies() if self._share.is_committer else None)
        )
        found_by_machine = {machine: found for machine, found in answers if found is not None}
        found_by_rank: list[dict[str, _LocalFiles]] = [found_by_machine[machine] for machine, _ in answers]
        numbers = {name: parse_number(Path(name)) or 0 for found in found_by_rank for name in found}
        for name in sorted(numbers, key=lambda each: -numbers[each]):
            copies = [found.get(name) for found in found_by_rank]
            present = [each for each in copies if each is not None]
            missing = present[0].all_names.difference(*(each.local_names for each in present))
            if len({each.sha256 for each in present}) > 1:
                log.warning("%s in memory is skipped: machines have kept different states under that name", name)
            elif missing:
                log.warning("%s in memory is skipped: no machine holds %s", name, ", ".join(sorted(missing)[:3]))
            else:
                if any(each is None or each.local_names != each.all_names for each in copies):
                    holders = [each is not None for each in copies]
                    files = [each.local_names if each else () for each in copies]
                    copy_to_machines(self._folder / name, holders, self._share.is_committer, self._collectives, files)
                return self._folder / name
        return None

    def _verify_copies(self) -> dict[str, _LocalFiles]:
        """Return this machine's in-memory checkpoints by name, after verifying the hashes of all files.

        Damaged checkpoints are deleted, with a warning.
        """
        copies = {}
        for folder in self._list_committed():
            try:
                manifest = read_manifest(folder)
                local_files = [each for each in manifest.files.values() if (folder / each.name).exists()]
                read_files(folder, local_files)
                copies[folder.name] = _LocalFiles(
                    manifest.sha256, frozenset(manifest.files), frozenset(each.name for each in local_files)
                )
            except CheckpointError as error:
                log.warning("a state in memory is skipped: %s", error, main_process_only=False)
                with suppress(OSError):
                    folders.find_store(folder).remove()
        return copies

    def is_newer(self, in_memory: Path, on_disk: Path | None) -> bool:
        """Whether an in-memory checkpoint is newer than a checkpoint on the disk.

        Args:
            in_memory: Folder of the in-memory checkpoint.
            on_disk: Folder of the checkpoint on the disk, or None if there is none.
        """
        return on_disk is None or (parse_number(on_disk) or 0) < int(read_manifest(in_memory).about["iteration"])

    def is_in_memory(self, folder: Path) -> bool:
        """Whether this folder is one of this run's in-memory checkpoints."""
        return bool(self._folder.name) and folder.parent == self._folder
