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
from headway.core.checkpoint.stores.disk import write_forced
from headway.core.runtime.collectives.checked import Collectives
from headway.core.runtime.process import ProcessRuntime
from headway.errors import CheckpointDamaged, CheckpointError

_PIECE = 16 * 2**20


def copy_to_machines(
    folder: Path,
    holders: Sequence[bool],
    is_lead: bool,
    collectives: Collectives,
    files: Sequence[Collection[str]] | None = None,
) -> None:
    """Copy a checkpoint, or some of its files, to the machines that lack it. Every rank must call it.

    Args:
        folder: Folder of the checkpoint on this rank's disk.
        holders: For each rank, whether its disk has the checkpoint. At least one must be True.
        is_lead: Whether this rank writes the received files to its machine's disk.
        collectives: Collectives over all ranks.
        files: For each rank, the checkpoint's files on its disk. Default: None, each disk that has the checkpoint has
            all its files.

    Raises:
        CheckpointError: On every rank, if any rank fails to read or to write.
    """
    source = holders.index(True)
    is_source = collectives.rank == source
    failures: list[str] = []

    def run_unless_failed(act: Callable[..., Any], *given: Any) -> Any:
        """Call a function unless an earlier step has failed, and return its result.

        Record an error that the function raises. Return None if this step or an earlier one has failed.
        """
        try:
            return None if failures else act(*given)
        except (OSError, CheckpointError) as error:
            failures.append(f"{type(error).__name__}: {error}")
            return None

    def raise_together() -> None:
        errors_of_ranks = collectives.gather_objects(next(iter(failures), None))
        failed = [f"rank {rank}: {text}" for rank, text in enumerate(errors_of_ranks) if text is not None]
        if failed:
            raise CheckpointError(f"{folder} could not be handed on to a machine without it: " + "; ".join(failed))

    manifest: Manifest | None = collectives.broadcast_object(
        run_unless_failed(read_manifest, folder) if is_source else None, source
    )
    if manifest is None:
        raise_together()
    assert manifest is not None
    nonce = collectives.broadcast_object(secrets.token_hex(8), source)
    staging = folders.find_store(folder).get_staging(nonce)
    held_files = [set(files[rank] if files else manifest.files) if has else set() for rank, has in enumerate(holders)]
    own = held_files[collectives.rank]
    is_receiver = is_lead and not (holders[collectives.rank] and own >= manifest.files.keys())
    for name in own if is_receiver else ():
        run_unless_failed(_link_file, folder / name, staging / name)
    for name, written in manifest.files.items():
        has = [name in each for each in held_files]
        if all(has):
            continue
        source = has.index(True)
        is_source = collectives.rank == source
        pieces = _iterate_pieces(folder / name)
        for start in range(0, max(1, written.num_bytes), _PIECE):
            piece = collectives.broadcast_object(
                run_unless_failed(next, pieces, b"") or b"" if is_source else b"", source
            )
            if is_receiver and name not in own:
                run_unless_failed(_append_piece, staging / name, piece, start == 0)
    if is_receiver:
        run_unless_failed(_commit_received, staging, folder, manifest)
        shutil.rmtree(staging, ignore_errors=True)
    raise_together()


def _iterate_pieces(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as file:
        while piece := file.read(_PIECE):
            yield piece


def _link_file(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    os.link(source, target)


def _append_piece(path: Path, piece: bytes, is_first: bool) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_forced(path, piece, "wb" if is_first else "ab")


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
        self._damaged: dict[str, str] = {}

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
        reasons: list[str] = []
        everywhere = self._gather_held_checkpoints(candidates)
        holders = [bool(each) for each in everywhere]
        is_held, is_everywhere = holders[self._runtime.rank], all(holders)
        for name, _ in _list_common([each for each in everywhere if each]):
            problem = self._agree_on_problem(parent / name, is_held, are_hashes_compared=not is_everywhere)
            if problem is None:
                if not is_everywhere:
                    copy_to_machines(parent / name, holders, self._runtime.local_rank == 0, self._collectives)
                return parent / name, reasons
            reasons.append(problem)
        return None, reasons

    def _gather_held_checkpoints(self, candidates: Sequence[Path]) -> list[list[tuple[str, str]]]:
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

    def _agree_on_problem(self, folder: Path, is_held: bool, are_hashes_compared: bool) -> str | None:
        """Return the reason why a checkpoint cannot be read, or None if no problem is found. Every rank must call it.

        All ranks return the same text. One rank per machine examines the files on its disk. Rank 0 examines the objects
        in an object store. A checkpoint in which `read` has found damage is refused without an examination.

        Args:
            folder: Folder of the checkpoint.
            is_held: Whether this rank's disk has the checkpoint.
            are_hashes_compared: Whether to compare every byte with the hashes. If False, only the lengths of the files
                are checked. Object stores are always read with a comparison of hashes, so none is made here.
        """
        problem: str | None = None
        try:
            manifest = read_manifest(folder) if is_held else None
            if manifest is not None and manifest.sha256 in self._damaged:
                raise CheckpointError(self._damaged[manifest.sha256])
            store = folders.find_store(folder)
            rank = self._runtime.rank if store.verifies_on_read else self._runtime.local_rank
            if manifest is not None and rank == 0:
                problem = store.find_absent(manifest)
                if problem is None and are_hashes_compared and not store.verifies_on_read:
                    self._verified = folder, verify_checkpoint(folder, manifest).sha256
        except (OSError, CheckpointError) as error:
            problem = str(error)
        found = [text for text in self._collectives.gather_objects(problem) if text is not None]
        return found[0] if found else None

    @pause_garbage_collection()
    def read(self, path: Path, placing: TargetLayout | None = None) -> tuple[Manifest, CollectedState]:
        """Return a checkpoint's manifest and state, verified against the hashes. Every rank must call it.

        One rank per machine compares all bytes with their hashes, unless `find_first_complete` has just done so. Other
        ranks compare only the bytes of their own shards. Weights are views of the files, or are read from the files
        when they are copied.

        Args:
            path: Folder of the checkpoint.
            placing: Layout of this run. Each rank reads only its own shards of sharded tensors. Default: None, nothing
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
            is_known, self._verified = self._verified == (folder, sha256), None
            tensors, owned = read_state(folder, manifest, self._runtime.local_rank == 0 and not is_known, placing)
            set_saved_strides(manifest.state, tensors)
            result = manifest, CollectedState(tensors, dict(manifest.aliases), dict(manifest.state), owned)
        except (OSError, CheckpointError) as error:
            failure = str(error), isinstance(error, CheckpointDamaged)
        outcomes = self._collectives.gather_objects((failure, sha256))
        failures = [each for each, _ in outcomes if each is not None]
        text = "; ".join(sorted({text for text, _ in failures}))
        is_damaged = bool(failures) and all(is_damage for _, is_damage in failures)
        is_on_disk = not folders.find_store(folder).verifies_on_read
        if failures and not is_damaged and is_on_disk and all(own for _, own in outcomes):
            # Damage can also show as a file that cannot be parsed, or only on the ranks that compare hashes.
            problem = self._agree_on_problem(folder, True, are_hashes_compared=True)
            is_damaged, text = problem is not None, problem or text
        if is_damaged:
            self._damaged |= {own: text for each, own in outcomes if each is not None}
            raise CheckpointDamaged(text)
        if failures:
            raise CheckpointError(text)
        if len({own for _, own in outcomes}) > 1:
            raise CheckpointError(f"{path} is not the same checkpoint on every rank (manifest hashes differ)")
        assert result is not None
        return result


def _list_common(everywhere: Sequence[Sequence[tuple[str, str]]]) -> list[tuple[str, str]]:
    """Return the checkpoints that all disks have, in the first disk's order.

    Damaged checkpoints are included, so that they are reported.

    Args:
        everywhere: For each disk, pairs of (name, manifest hash, or a text that begins with "damaged").
    """
    first = everywhere[0] if everywhere else ()
    return [pair for pair in first if all(pair in each or pair[1].startswith("damaged") for each in everywhere)]
