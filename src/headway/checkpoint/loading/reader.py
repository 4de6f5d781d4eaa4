"""Finding and reading checkpoints on all ranks together.

A checkpoint is handed on to machines with empty disks of their own, such as one that replaces a lost one: its files travel in
bounded pieces from one machine that holds it, are forced to the disk, verified and committed there as in a save.
"""

import os
import secrets
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from headway.checkpoint import folders
from headway.checkpoint.format.manifest import Manifest, read_manifest
from headway.checkpoint.loading.files import TargetLayout, read_state, verify
from headway.checkpoint.loading.reading import verify_share
from headway.checkpoint.state import CollectedState
from headway.checkpoint.stores.disk import write_forced
from headway.errors import CheckpointDamaged, CheckpointError
from headway.runtime.collectives.checked import Collectives
from headway.runtime.process import ProcessRuntime

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
    staging = folders.store_of(folder).staging(nonce)
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
    write_forced(path, piece, "wb" if is_first else "ab")


def _commit(staging: Path, folder: Path, manifest: Manifest) -> None:
    """Give the folder its name, and compare every byte."""
    staging.mkdir(parents=True, exist_ok=True)  # where there was no file
    folders.commit(staging, folder, manifest)
    verify(folder)


class CheckpointReader:
    """Finds and reads checkpoints for one Accelerator.

    Args:
        runtime: this process.
        collectives: among all ranks.
    """

    def __init__(self, runtime: ProcessRuntime, collectives: Collectives) -> None:
        self._runtime = runtime
        self._collectives = collectives
        self._verified: tuple[Path, str] | None = None
        self._damaged: dict[str, str] = {}

    def largest(self, number: int) -> int:
        """The largest of all ranks' numbers: machines may not hold the same checkpoints."""
        return int(self._collectives.reduce_numbers([number], "max")[0])

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
            if manifest is not None and manifest.sha256 in self._damaged:
                raise CheckpointError(self._damaged[manifest.sha256])
            store = folders.store_of(folder)
            if store.verifies_on_read:
                problem = store.absent(manifest) if manifest is not None and self._runtime.rank == 0 else None
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
            CheckpointError: on every rank, where any finds it missing.
            CheckpointDamaged: the same, where it is damaged; `newest` passes over it from now on.
        """
        result: tuple[Manifest, CollectedState] | None = None
        failure: tuple[str, bool] | None = None
        sha256 = ""
        try:
            folder = folders.store_of(path).locate()
            manifest = read_manifest(folder)
            sha256 = manifest.sha256
            is_known, self._verified = self._verified == (folder, manifest.sha256), None
            tensors, owned = read_state(folder, manifest, self._runtime.local_rank == 0 and not is_known, placing)
            result = manifest, CollectedState(tensors, dict(manifest.aliases), dict(manifest.state), owned)
        except CheckpointError as error:
            failure = str(error), isinstance(error, CheckpointDamaged)
        told = self._collectives.gather_objects((failure, sha256))
        failures = [each for each, _ in told if each is not None]
        text = "; ".join(sorted({text for text, _ in failures}))
        if failures and all(is_damage for _, is_damage in failures):
            self._damaged |= {own: text for each, own in told if each is not None}
            raise CheckpointDamaged(text)
        if failures:
            raise CheckpointError(text)
        if len({own for _, own in told}) > 1:
            raise CheckpointError(f"{path} is not the same checkpoint on every rank (manifest hashes differ)")
        assert result is not None
        return result


def _common(everywhere: Sequence[Sequence[tuple[str, str]]]) -> list[tuple[str, str]]:
    """What all of the disks hold, in the order of the first; a damaged one is looked at, to say so."""
    first = everywhere[0] if everywhere else ()
    return [pair for pair in first if all(pair in each or pair[1].startswith("damaged") for each in everywhere)]
