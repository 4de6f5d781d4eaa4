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

from headway.common import env
from headway.core.checkpoint import folders
from headway.core.checkpoint.format.foreign import parse_number
from headway.core.checkpoint.format.manifest import MANIFEST, read_manifest
from headway.core.checkpoint.loading.copying import copy_to_machines
from headway.core.checkpoint.loading.reading import read_files
from headway.core.checkpoint.resume.state import CheckpointState
from headway.core.checkpoint.saving import writer
from headway.core.checkpoint.saving.background import BackgroundSave
from headway.core.checkpoint.saving.checkpoint_folder import CheckpointFolder
from headway.core.checkpoint.saving.job import DiskShare, SaveJob, SavePolicy
from headway.core.checkpoint.saving.snapshot import HostCopies
from headway.core.checkpoint.state import split_dtensors
from headway.core.data.loader import PreparedLoader
from headway.core.runtime.collectives.checked import Collectives
from headway.core.training.hooks import StepHooks
from headway.errors import CheckpointError
from headway.extras.moving_average import holds_averages
from headway.extras.neighbor_copies import NeighborCopies
from headway.log import get_logger

log = get_logger(__name__)

_NUM_KEPT = 2
"""Number of in-memory checkpoints that are kept: the last one, and the one before it.

The earlier one is needed if the last one is incomplete.
"""
_POLL_SECONDS = 0.0005
"""Seconds between two checks of whether another rank has committed the checkpoint."""

_RANK_KINDS = ("loaders", "streams")
"""Keys of the states that differ between ranks: data positions and RNG states. Each rank saves its own."""


class _SentState(NamedTuple):
    """Part of a checkpoint that each rank sends to all others.

    Attributes:
        states: States of this rank, in the order of `_RANK_KINDS`.
        tensors: Tensors in these states, by logical name.
        about: The manifest's `about` section.
        seen: Tokens that this rank has trained on, as `SeenData.list_share` returns them.
    """

    states: list[Any]
    tensors: dict[str, torch.Tensor]
    about: dict[str, Any]
    seen: list[float]


class _RankMemory(NamedTuple):
    """Message of each rank to all others before the first in-memory checkpoint.

    Attributes:
        folder: Shared-memory folder of the rank's launch agent. Empty if there is none.
        newest: Number of the newest committed in-memory checkpoint on the rank's machine. 0 if there is none.
        nonce: Random text that makes the names of a run's staging directories unique. All ranks use rank 0's.
    """

    folder: str
    newest: int
    nonce: str


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


def _find_problem(copies: Sequence[_LocalFiles]) -> str:
    """Return the reason why one in-memory checkpoint cannot be loaded. Empty if its files are complete.

    Args:
        copies: Files of the checkpoint on each machine that has its manifest. At least one is required.
    """
    if len({each.sha256 for each in copies}) > 1:
        return "machines have kept different states under that name"
    missing = copies[0].all_names.difference(*(each.local_names for each in copies))
    if missing:
        return f"no machine has {', '.join(sorted(missing)[:3])}"
    return ""


class MemoryTier:
    """Manager of a run's in-memory checkpoints. After updates, they are saved in each machine's shared memory.

    Args:
        state: State of the run that checkpoints contain.
        collectives: Collectives over all ranks.
        checkpoint_folder: Folder of the checkpoints on the disk.
        step_hooks: Hooks of the training step.
    """

    def __init__(
        self,
        state: CheckpointState,
        collectives: Collectives,
        checkpoint_folder: CheckpointFolder,
        step_hooks: StepHooks,
    ) -> None:
        self._state = state
        self._collectives = collectives
        self._checkpoint_folder = checkpoint_folder
        # Set by the first call of `_set_up_saving`.
        self._share: DiskShare | None = None
        self._folder = Path()
        self._next_number = 0
        self._nonce = ""
        self._neighbors: NeighborCopies | None = None
        self._is_disabled = False
        self._last_update = 0
        self._background = BackgroundSave()
        self._copies = HostCopies()
        self._job: SaveJob | None = None
        self._failure: str | None = None  # of an earlier save; reported to the other ranks at the next one
        state.progress.before_training_batch.append(self._before_batch)
        step_hooks.before_micro_batch.append(self._before_micro_batch)
        step_hooks.before_update.append(self.finish_save)
        step_hooks.before_swap.append(self.finish_save)

    # ---------------------------------------------------------------- after an update

    def _before_batch(self, loader: PreparedLoader) -> None:
        """Start a checkpoint that is due, before a batch of the training data is read."""
        self._save_if_due()

    def _before_micro_batch(self) -> None:
        """Start a checkpoint that is due, in a training loop without a prepared loader."""
        if self._state.progress.is_without_loader:
            self._save_if_due()

    def _save_if_due(self) -> None:
        """Start an in-memory checkpoint if one is due: at each update whose number is a multiple of `keep_in_memory`.

        Do nothing inside an accumulation window, inside a block of local SGD, and while a model contains averaged weights.
        """
        state = self._state
        update = state.run.clock.num_updates
        is_due = update != self._last_update and update % self._checkpoint_folder.project.keep_in_memory == 0
        if self._is_disabled or not is_due or state.run.windows.is_unfinished:
            return
        if state.local.has_diverged or any(state.local.list_steps()):
            return  # local SGD exchanges state only at the end of its blocks
        if holds_averages(state.run):  # an evaluation: the next batch of the training saves the trained weights
            return
        self.finish_save()
        self._last_update = update
        if not self._set_up_saving():
            return
        job, own_state = None, None
        try:
            job, own_state = self._prepare_job()
        except Exception as error:  # all ranks must stop together
            self._failure = f"{type(error).__name__}: {error}"
        # The failure may also be of the previous save, which ran in the background.
        reports = self._collectives.gather_objects((self._failure, own_state))
        failures = [f"rank {rank}: {failure}" for rank, (failure, _) in enumerate(reports) if failure is not None]
        if failures or job is None:
            self._stop_saving("; ".join(failures), job)
            return
        self._start_job(job, [rank_state for _, rank_state in reports])

    def _prepare_job(self) -> tuple[SaveJob, _SentState]:
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
        about |= {"name": final.name, "iteration": self._checkpoint_folder.iteration}
        policy = SavePolicy(_NUM_KEPT, owns_parent=True, is_blocking=False, is_published=False)
        job = SaveJob(final, f"{self._nonce}{self._next_number:08x}", self._share, collected, about, policy)
        job.staging.mkdir(exist_ok=True)
        if self._neighbors is not None:
            self._neighbors.announce(job.staging)
        writer.mark_as_writing(job)
        self._next_number += 1
        return job, _SentState(states, tensors, about, self._state.run.seen.list_share())

    def _start_job(self, job: SaveJob, rank_states: Sequence[_SentState]) -> None:
        """Start to copy the tensors of a save job to host memory, and to write them in the background.

        A failure is not raised, but reported when the next checkpoint is due.

        Args:
            job: Save job of this rank.
            rank_states: States of every rank, which are added to the checkpoint.
        """
        content = job.content
        state = self._state
        for index, kind in enumerate(_RANK_KINDS):
            content.state[kind] = [each.states[index] for each in rank_states]
        for each in rank_states:
            content.tensors.update(each.tensors)
        seen = state.run.seen
        totals = seen.add_up(seen.read_counts().samples, [each.seen for each in rank_states])
        about = rank_states[0].about | totals.to_dict()
        if not self._checkpoint_folder.project.save_frozen:
            state.collector.replace_frozen_weights(content)
        constant_names = state.collector.list_step_tensors(content)
        try:
            content = split_dtensors(content)
            job = replace(job, content=content, about=about)
            snapshot = self._copies.copy_tensors(content.tensors, job.own_names, constant_names)
        except (CheckpointError, RuntimeError) as error:  # reported at the next update
            self._failure = f"{type(error).__name__}: {error}"
            writer.get_part_marks(job.staging, job.share.part).writing.unlink(
                missing_ok=True
            )  # ends the wait of the committer
            return
        self._job = replace(
            job,
            content=replace(content, tensors=snapshot.tensors),
            pending_copies=snapshot.pending_copies,
            check_sources=snapshot.uncopied_versions.ensure_unchanged,
        )
        if self._neighbors is not None:
            self._job = replace(self._job, exchange_parts=partial(self._neighbors.exchange, job.staging))
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

    def _stop_saving(self, reason: str, job: SaveJob | None) -> None:
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

    def _set_up_saving(self) -> bool:
        """Find out at the first call which ranks are on one machine, and divide the files among them.

        Every rank must call it. Later calls only return the result.

        Returns:
            Whether in-memory checkpoints are possible. If not, a warning was logged.
        """
        if self._share is not None or self._is_disabled:
            return not self._is_disabled
        memory_folder = env.get(env.MEMORY) or ""
        if memory_folder:
            # Each Accelerator of a process has its own folder.
            self._folder = (
                Path(memory_folder)
                / hashlib.sha256(str(self._checkpoint_folder.get_parent()).encode()).hexdigest()[:16]
            )
            self._folder.mkdir(exist_ok=True)
        newest = max((parse_number(path) or 0 for path in self._list_committed()), default=0)
        answers: list[_RankMemory] = self._collectives.gather_objects(
            _RankMemory(memory_folder, newest, secrets.token_hex(4))
        )
        self._next_number = 1 + max(each.newest for each in answers)
        self._nonce = answers[0].nonce
        # Ranks with the same folder of shared memory are on one machine.
        machines = [each.folder for each in answers]
        if not all(machines):
            self._is_disabled = True
            log.warning(
                "keep_in_memory has no effect: it needs shared memory (/dev/shm) of the agent that `headway launch` runs for several "
                "processes, and this process was not started by one"
            )
            return False
        self._divide_files(machines)
        return True

    def _divide_files(self, machines: Sequence[str]) -> None:
        """Choose which files of each checkpoint this rank writes, and delete the files of interrupted saves.

        Every rank must call it.

        Args:
            machines: Machine of each rank, as the path of its shared-memory folder.
        """
        rank = self._collectives.rank
        local_rank = machines[:rank].count(machines[rank])
        is_committer = local_rank == 0
        if len(set(machines)) > 1 and self._state.objects.is_sharded:
            self._share = DiskShare(rank, len(machines), is_committer)
            self._neighbors = NeighborCopies(self._state.run.runtime, machines)
        else:
            # Each machine stores everything. All of them must split it in the same way, to commit the same manifest.
            num_parts = min(machines.count(machine) for machine in machines)
            self._share = DiskShare(local_rank if local_rank < num_parts else None, num_parts, is_committer)
        if is_committer:
            folders.find_store(self._folder).remove_leftovers()
        self._collectives.barrier()

    def _list_committed(self) -> list[Path]:
        """Return the committed checkpoints in shared memory, newest first."""
        return folders.list_committed(self._folder) if self._folder.name else []

    # ---------------------------------------------------------------- after a restart

    def find_newest(self) -> Path | None:
        """Copy the newest valid in-memory checkpoint to every machine. Return its folder, or None if there is none.

        Every rank must call it.
        """
        if not self._set_up_saving() or self._share is None:
            return None
        # One rank of each machine reads the files. The ranks of a machine have the same shared-memory folder.
        own_copies = self._verify_copies() if self._share.is_committer else None
        answers = self._collectives.gather_objects((env.get(env.MEMORY), own_copies))
        copies_by_machine = {machine: copies for machine, copies in answers if copies is not None}
        copies_by_rank: list[dict[str, _LocalFiles]] = [copies_by_machine[machine] for machine, _ in answers]
        names = dict.fromkeys(name for copies in copies_by_rank for name in copies)  # the same order on every rank
        for name in sorted(names, key=lambda each: parse_number(Path(each)) or 0, reverse=True):
            rank_files = [copies.get(name) for copies in copies_by_rank]
            problem = _find_problem([files for files in rank_files if files is not None])
            if problem:
                log.warning("%s in memory is skipped: %s", name, problem)
                continue
            folder = self._folder / name
            if any(files is None or files.local_names != files.all_names for files in rank_files):
                has_checkpoint = [files is not None for files in rank_files]
                local_names = [files.local_names if files else () for files in rank_files]
                copy_to_machines(folder, has_checkpoint, self._share.is_committer, self._collectives, local_names)
            return folder
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
