"""Find and read checkpoints on all ranks together."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

from headway.common.garbage import pause_garbage_collection
from headway.core.checkpoint import folders
from headway.core.checkpoint.format.manifest import Manifest, read_manifest
from headway.core.checkpoint.format.values import set_saved_strides
from headway.core.checkpoint.loading.compiled_names import rename_compiled
from headway.core.checkpoint.loading.copying import copy_to_machines
from headway.core.checkpoint.loading.files import read_state, verify_checkpoint
from headway.core.checkpoint.loading.target_layout import TargetLayout
from headway.core.checkpoint.state import CollectedState
from headway.core.runtime.collectives.checked import Collectives
from headway.core.runtime.process import ProcessRuntime
from headway.errors import CheckpointDamaged, CheckpointError


class CheckpointReader:
    """Component of an Accelerator that finds, verifies and reads checkpoints on all ranks together.

    Args:
        runtime: Runtime of this process.
        collectives: Collectives over all ranks.
    """

    def __init__(self, runtime: ProcessRuntime, collectives: Collectives) -> None:
        self._runtime = runtime
        self._collectives = collectives
        self._verified_checkpoint: tuple[Path, str] | None = None
        """Pair of (folder, manifest hash) of the checkpoint whose bytes this rank has compared for the next `read`."""
        self._damage_by_hash: dict[str, str] = {}
        """Error message of each checkpoint in which `read` has found damage, by manifest hash."""

    def find_largest(self, number: int) -> int:
        """Return the largest of the numbers that the ranks pass. Every rank must call it.

        Ranks pass different checkpoint numbers if their machines hold different checkpoints.
        """
        return int(self._collectives.reduce_numbers([number], "max")[0])

    def find_first_complete(self, parent: Path, candidates: Sequence[Path]) -> tuple[Path | None, list[str]]:
        """Return the first candidate that has all its files on every machine. Every rank must call it.

        The lengths of the files are checked. The hashes of their bytes are left to `read`, which compares them while it
        reads. If `read` finds damage, the next call skips that checkpoint. If the disks of some machines have none of
        the candidates, the hashes are compared here, and the checkpoint is then copied to these machines. A candidate
        that only some of the other disks hold is ignored without a message.

        Args:
            parent: Folder that holds the checkpoints.
            candidates: Checkpoints on this rank's disk, in order of preference.

        Returns:
            Pair of (folder of the checkpoint or None, one message for each candidate that is skipped).

        Raises:
            CheckpointError: On every rank, if the checkpoint could not be copied to a machine that lacks it.
        """
        problems: list[str] = []
        candidates_by_rank = self._gather_candidates(candidates)
        has_candidates = [bool(each) for each in candidates_by_rank]
        is_on_own_disk, is_on_all_disks = has_candidates[self._runtime.rank], all(has_candidates)
        for name, _ in _list_common([each for each in candidates_by_rank if each]):
            problem = self._agree_on_problem(parent / name, is_on_own_disk, compares_hashes=not is_on_all_disks)
            if problem is None:
                if not is_on_all_disks:
                    copy_to_machines(parent / name, has_candidates, self._runtime.local_rank == 0, self._collectives)
                return parent / name, problems
            problems.append(problem)
        return None, problems

    def _gather_candidates(self, candidates: Sequence[Path]) -> list[list[tuple[str, str]]]:
        """Return the candidates on the disks of all ranks, in order of preference. Every rank must call it.

        Returns:
            For each rank, pairs of (name, manifest hash). If a manifest is damaged, a text that begins with "damaged"
                takes the place of the hash.
        """
        own: list[tuple[str, str]] = []
        for folder in candidates:
            try:
                own.append((folder.name, read_manifest(folder).sha256))
            except (OSError, CheckpointError) as error:
                own.append((folder.name, f"damaged: {error}"))
        return self._collectives.gather_objects(own)

    def _agree_on_problem(self, folder: Path, is_on_own_disk: bool, compares_hashes: bool) -> str | None:
        """Return the reason why a checkpoint cannot be read, or None if no problem is found. Every rank must call it.

        All ranks return the same text. One rank per machine examines the files on its disk. Rank 0 examines the objects
        in an object store. A checkpoint in which `read` has found damage is refused without an examination.

        Args:
            folder: Folder of the checkpoint.
            is_on_own_disk: Whether this rank's disk has the checkpoint.
            compares_hashes: Whether to compare every byte with the hashes. If False, only the lengths of the files are
                checked. Object stores are always read with a comparison of hashes, so none is made here.
        """
        problem: str | None = None
        if is_on_own_disk:
            try:
                problem = self._find_own_problem(folder, compares_hashes)
            except (OSError, CheckpointError) as error:
                problem = str(error)
        problems = [text for text in self._collectives.gather_objects(problem) if text is not None]
        return problems[0] if problems else None

    def _find_own_problem(self, folder: Path, compares_hashes: bool) -> str | None:
        """Return the reason why this rank cannot read a checkpoint, or None if it finds no problem.

        Only one rank per machine, or for an object store only rank 0, examines more than the manifest. If it compares
        all hashes, it records this in `_verified_checkpoint`, so that the next `read` need not repeat it.

        Args:
            folder: Folder of the checkpoint.
            compares_hashes: Whether to compare every byte with the hashes.

        Raises:
            OSError: If the manifest or a file cannot be read.
            CheckpointError: If the manifest is damaged, or a file differs from it.
        """
        manifest = read_manifest(folder)
        if manifest.sha256 in self._damage_by_hash:
            return self._damage_by_hash[manifest.sha256]
        store = folders.find_store(folder)
        rank = self._runtime.rank if store.verifies_on_read else self._runtime.local_rank
        if rank != 0:
            return None
        problem = store.find_absent(manifest)
        if problem is None and compares_hashes and not store.verifies_on_read:
            self._verified_checkpoint = folder, verify_checkpoint(folder, manifest).sha256
        return problem

    @pause_garbage_collection()
    def read(self, path: Path, layout: TargetLayout | None = None) -> tuple[Manifest, CollectedState]:
        """Return a checkpoint's manifest and state, verified against the hashes. Every rank must call it.

        One rank per machine compares all bytes with their hashes, unless `find_first_complete` has just done so. Other
        ranks compare only the bytes of their own shards. Weights are views of the files, or are read from the files
        when they are copied.

        Args:
            path: Folder of the checkpoint.
            layout: Layout of this run. Each rank reads only its own shards of sharded tensors. Default: None, nothing
                is sharded.

        Raises:
            CheckpointError: On every rank, if any rank cannot find or read the checkpoint, or the ranks have different
                checkpoints in this folder.
            CheckpointDamaged: On every rank, if the checkpoint is damaged. Later searches for the newest checkpoint
                skip it.
        """
        result: tuple[Manifest, CollectedState] | None = None
        own_outcome = _ReadOutcome()
        folder = path
        try:
            folder = folders.find_store(path).find_folder()
            saved_manifest = read_manifest(folder)
            own_outcome = _ReadOutcome(saved_manifest.sha256)
            manifest = rename_compiled(saved_manifest)
            was_verified = self._verified_checkpoint == (folder, saved_manifest.sha256)
            self._verified_checkpoint = None
            verifies = self._runtime.local_rank == 0 and not was_verified
            tensors, owned = read_state(folder, manifest, verifies, layout)
            set_saved_strides(manifest.state, tensors)
            result = manifest, CollectedState(tensors, dict(manifest.aliases), dict(manifest.state), owned)
        except (OSError, CheckpointError) as error:
            own_outcome = own_outcome._replace(failure=str(error), is_damage=isinstance(error, CheckpointDamaged))
        outcomes = [_ReadOutcome(*fields) for fields in self._collectives.gather_objects(tuple(own_outcome))]
        if any(outcome.failure is not None for outcome in outcomes):
            self._raise_failures(folder, outcomes)
        if len({outcome.manifest_hash for outcome in outcomes}) > 1:
            raise CheckpointError(f"{path} is not the same checkpoint on every rank (manifest hashes differ)")
        assert result is not None
        return result

    def _raise_failures(self, folder: Path, outcomes: "Sequence[_ReadOutcome]") -> NoReturn:
        """Raise the error of a read that has failed on at least one rank. Every rank must call it.

        The read failed because of damage if all failed ranks found a wrong hash. Damage can also show as a file that
        cannot be parsed, or only on the ranks that compare hashes. So for other failures, all hashes are compared.

        Args:
            folder: Folder of the checkpoint.
            outcomes: Outcome of the read on each rank.

        Raises:
            CheckpointDamaged: If the checkpoint is damaged. It is recorded, so that later searches skip it.
            CheckpointError: If the read has failed for another reason.
        """
        failed = [outcome for outcome in outcomes if outcome.failure is not None]
        message = "; ".join(sorted({str(outcome.failure) for outcome in failed}))
        is_damaged = all(outcome.is_damage for outcome in failed)
        is_on_disk = not folders.find_store(folder).verifies_on_read
        have_manifest = all(outcome.manifest_hash for outcome in outcomes)
        if not is_damaged and is_on_disk and have_manifest:
            problem = self._agree_on_problem(folder, is_on_own_disk=True, compares_hashes=True)
            if problem is not None:
                is_damaged, message = True, problem
        if not is_damaged:
            raise CheckpointError(message)
        self._damage_by_hash |= {outcome.manifest_hash: message for outcome in failed}
        raise CheckpointDamaged(message)


class _ReadOutcome(NamedTuple):
    """Outcome of reading a checkpoint on one rank.

    Attributes:
        manifest_hash: Hash of the manifest. Empty if the manifest could not be read.
        failure: Error message, or None if the read has succeeded.
        is_damage: Whether the error was a wrong hash.
    """

    manifest_hash: str = ""
    failure: str | None = None
    is_damage: bool = False


def _list_common(candidates_by_disk: Sequence[Sequence[tuple[str, str]]]) -> list[tuple[str, str]]:
    """Return the checkpoints that all disks have, in the first disk's order.

    Damaged checkpoints are included, so that they are reported.

    Args:
        candidates_by_disk: For each disk, pairs of (name, manifest hash, or a text that begins with "damaged").
    """
    if not candidates_by_disk:
        return []
    common = []
    for name, manifest_hash in candidates_by_disk[0]:
        is_damaged = manifest_hash.startswith("damaged")
        if is_damaged or all((name, manifest_hash) in each for each in candidates_by_disk):
            common.append((name, manifest_hash))
    return common
