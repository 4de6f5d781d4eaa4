"""Find and read checkpoints on all ranks together, and copy them to machines whose disks lack them.

A machine with an empty disk, for example a replacement for a lost one, receives the checkpoint from a machine that
has it. The files are sent in blocks of 16 MiB, flushed to the disk, verified, and committed like a new checkpoint.
"""

import os
import secrets
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from headway.common.garbage import pause_garbage_collection
from headway.core.checkpoint import folders
from headway.core.checkpoint.format.manifest import Manifest, read_manifest
from headway.core.checkpoint.format.values import set_saved_strides
from headway.core.checkpoint.loading.compiled_names import rename_compiled
from headway.core.checkpoint.loading.files import TargetLayout, read_state, verify_checkpoint
from headway.core.checkpoint.state import CollectedState
from headway.core.checkpoint.stores.disk import write_and_sync
from headway.core.runtime.collectives.checked import Collectives
from headway.core.runtime.process import ProcessRuntime
from headway.errors import CheckpointDamaged, CheckpointError

_BLOCK = 16 * 2**20
"""Bytes of a file that one broadcast sends."""


def copy_to_machines(
    folder: Path,
    has_checkpoint: Sequence[bool],
    writes_to_disk: bool,
    collectives: Collectives,
    files: Sequence[Collection[str]] | None = None,
) -> None:
    """Copy a checkpoint, or some of its files, to the machines that lack it. Every rank must call it.

    Args:
        folder: Folder of the checkpoint on this rank's disk.
        has_checkpoint: For each rank, whether its disk has the checkpoint. At least one must be True.
        writes_to_disk: Whether this rank writes the received files to its machine's disk. True on one rank per machine.
        collectives: Collectives over all ranks.
        files: For each rank, the checkpoint's files on its disk. Default: None, each disk that has the checkpoint has
            all its files.

    Raises:
        CheckpointError: On every rank, if any rank fails to read or to write.
    """
    source = has_checkpoint.index(True)
    is_source = collectives.rank == source
    failures: list[str] = []

    # After a failure, a rank still takes part in all broadcasts, so that the others do not wait for it.
    def run_unless_failed(function: Callable[..., Any], *args: Any) -> Any:
        """Call a function unless an earlier step has failed, and return its result.

        Record an error that the function raises. Return None if this step or an earlier one has failed.
        """
        try:
            return None if failures else function(*args)
        except (OSError, CheckpointError) as error:
            failures.append(f"{type(error).__name__}: {error}")
            return None

    def raise_together() -> None:
        first_failures = collectives.gather_objects(next(iter(failures), None))
        lines = [f"rank {rank}: {text}" for rank, text in enumerate(first_failures) if text is not None]
        if lines:
            raise CheckpointError(f"{folder} could not be handed on to a machine without it: " + "; ".join(lines))

    manifest: Manifest | None = collectives.broadcast_object(
        run_unless_failed(read_manifest, folder) if is_source else None, source
    )
    if manifest is None:
        raise_together()
    assert manifest is not None
    nonce = collectives.broadcast_object(secrets.token_hex(8), source)
    staging = folders.find_store(folder).get_staging(nonce)
    files_by_rank = _list_files_by_rank(manifest, has_checkpoint, files)
    own_files = files_by_rank[collectives.rank]
    is_complete = has_checkpoint[collectives.rank] and own_files >= manifest.files.keys()
    is_receiver = writes_to_disk and not is_complete
    for name in own_files if is_receiver else ():
        run_unless_failed(_link_file, folder / name, staging / name)
    for name, written in manifest.files.items():
        has_file = [name in each for each in files_by_rank]
        if all(has_file):
            continue
        source = has_file.index(True)
        is_source = collectives.rank == source
        blocks = _iterate_blocks(folder / name)
        for start in range(0, max(1, written.num_bytes), _BLOCK):
            own_block = run_unless_failed(next, blocks, b"") if is_source else None
            block = collectives.broadcast_object(own_block or b"", source)
            if is_receiver and name not in own_files:
                run_unless_failed(_append_block, staging / name, block, start == 0)
    if is_receiver:
        run_unless_failed(_commit_received, staging, folder, manifest)
        shutil.rmtree(staging, ignore_errors=True)
    raise_together()


def _list_files_by_rank(
    manifest: Manifest, has_checkpoint: Sequence[bool], files: Sequence[Collection[str]] | None
) -> list[set[str]]:
    """Return, for each rank, the checkpoint's files on its disk. The arguments are those of `copy_to_machines`."""
    all_files = set(manifest.files)
    return [
        (set(files[rank]) if files else all_files) if has_it else set() for rank, has_it in enumerate(has_checkpoint)
    ]


def _iterate_blocks(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            yield block


def _link_file(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    os.link(source, target)


def _append_block(path: Path, block: bytes, is_first: bool) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_and_sync(path, block, "wb" if is_first else "ab")


def _commit_received(staging: Path, folder: Path, manifest: Manifest) -> None:
    """Compare every byte of the received files with the hashes, then commit them as a checkpoint.

    The commit writes the manifest, so none is read from the received files.
    """
    staging.mkdir(parents=True, exist_ok=True)  # missing if no file was sent
    verify_checkpoint(staging, manifest)
    folders.commit_checkpoint(staging, folder, manifest)


class CheckpointReader:
    """Component of an Accelerator that finds, verifies and reads checkpoints on all ranks together.

    Args:
        runtime: Runtime of this process.
        collectives: Collectives over all ranks.
    """

    def __init__(self, runtime: ProcessRuntime, collectives: Collectives) -> None:
        self._runtime = runtime
        self._collectives = collectives
        self._verified: tuple[Path, str] | None = None
        """Pair of (folder, manifest hash) of the checkpoint whose bytes this rank has compared for the next `read`."""
        self._damaged: dict[str, str] = {}
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
        try:
            manifest = read_manifest(folder) if is_on_own_disk else None
            if manifest is not None and manifest.sha256 in self._damaged:
                raise CheckpointError(self._damaged[manifest.sha256])
            store = folders.find_store(folder)
            rank = self._runtime.rank if store.verifies_on_read else self._runtime.local_rank
            if manifest is not None and rank == 0:
                problem = store.find_absent(manifest)
                if problem is None and compares_hashes and not store.verifies_on_read:
                    self._verified = folder, verify_checkpoint(folder, manifest).sha256
        except (OSError, CheckpointError) as error:
            problem = str(error)
        problems = [text for text in self._collectives.gather_objects(problem) if text is not None]
        return problems[0] if problems else None

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
        failure: tuple[str, bool] | None = None
        folder, sha256 = path, ""
        try:
            folder = folders.find_store(path).find_folder()
            manifest = read_manifest(folder)
            sha256 = manifest.sha256
            manifest = rename_compiled(manifest)
            is_verified_already, self._verified = self._verified == (folder, sha256), None
            verifies = self._runtime.local_rank == 0 and not is_verified_already
            tensors, owned = read_state(folder, manifest, verifies, layout)
            set_saved_strides(manifest.state, tensors)
            result = manifest, CollectedState(tensors, dict(manifest.aliases), dict(manifest.state), owned)
        except (OSError, CheckpointError) as error:
            failure = str(error), isinstance(error, CheckpointDamaged)
        outcomes = self._collectives.gather_objects((failure, sha256))
        failures = [each for each, _ in outcomes if each is not None]
        text = "; ".join(sorted({text for text, _ in failures}))
        is_damaged = bool(failures) and all(is_damage for _, is_damage in failures)
        is_on_disk = not folders.find_store(folder).verifies_on_read
        have_manifest = all(manifest_hash for _, manifest_hash in outcomes)
        if failures and not is_damaged and is_on_disk and have_manifest:
            # Damage can also show as a file that cannot be parsed, or only on the ranks that compare hashes.
            problem = self._agree_on_problem(folder, is_on_own_disk=True, compares_hashes=True)
            is_damaged, text = problem is not None, problem or text
        if is_damaged:
            self._damaged |= {manifest_hash: text for each, manifest_hash in outcomes if each is not None}
            raise CheckpointDamaged(text)
        if failures:
            raise CheckpointError(text)
        if len({manifest_hash for _, manifest_hash in outcomes}) > 1:
            raise CheckpointError(f"{path} is not the same checkpoint on every rank (manifest hashes differ)")
        assert result is not None
        return result


def _list_common(candidates_by_disk: Sequence[Sequence[tuple[str, str]]]) -> list[tuple[str, str]]:
    """Return the checkpoints that all disks have, in the first disk's order.

    Damaged checkpoints are included, so that they are reported.

    Args:
        candidates_by_disk: For each disk, pairs of (name, manifest hash, or a text that begins with "damaged").
    """
    common = []
    for name, manifest_hash in candidates_by_disk[0] if candidates_by_disk else ():
        is_damaged = manifest_hash.startswith("damaged")
        if is_damaged or all((name, manifest_hash) in each for each in candidates_by_disk):
            common.append((name, manifest_hash))
    return common
