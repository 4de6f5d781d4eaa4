"""One rank's task in a save: the state to write, this rank's part of it, and the options of the save."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.core.checkpoint import folders
from headway.core.checkpoint.saving.file_plan import plan_files
from headway.core.checkpoint.saving.snapshot import PendingCopy
from headway.core.checkpoint.state import CollectedState
from headway.errors import ObjectStoreError
from headway.log import get_logger

log = get_logger(__name__)


@dataclass(frozen=True)
class SavePolicy:
    """Options of a save, including which checkpoints are kept.

    Attributes:
        keep: Number of this run's checkpoints to keep in the parent folder, including this one. Older ones are removed
            after the commit. None: all are kept.
        protected: Folders of checkpoints to keep regardless of their age (e.g. the best checkpoint).
        owns_parent: Whether the parent folder holds only this run's checkpoints. Files that any interrupted save has
            left there are then removed. Otherwise only those of this checkpoint's name are removed.
        is_blocking: Whether to return only when the checkpoint is on the disk. False: write in the background.
        timeout: Seconds to wait for the parts of other ranks.
        is_alone: Whether only this rank saves. It then writes everything and does not communicate.
        deferrable_names: Names of tensors that change only in an optimizer step. A background save copies them while
            training continues, and the next optimizer step waits for the copies.
        is_published: Whether to notify listeners of the commit, update the file `latest`, and check before the commit
            that the manifest can be decoded. False for states that are kept in host memory.
    """

    keep: int | None = None
    protected: tuple[Path, ...] = ()
    owns_parent: bool = False
    is_blocking: bool = True
    timeout: float = 600.0
    is_alone: bool = False
    deferrable_names: frozenset[str] = frozenset()
    is_published: bool = True


@dataclass(frozen=True)
class DiskShare:
    """Part of a checkpoint that this rank writes to its disk. The defaults describe a rank that writes everything.

    Attributes:
        part: Number of the part that this rank writes. None: it writes no part.
        num_parts: Number of parts on this disk.
        is_committer: Whether this rank commits the checkpoint on this disk. There is one such rank per disk.
        is_own_disk: Whether each machine has its own disk with a replica of the checkpoint.
    """

    part: int | None = 0
    num_parts: int = 1
    is_committer: bool = True
    is_own_disk: bool = False


@dataclass(frozen=True)
class SaveJob:
    """One rank's task in a save.

    Attributes:
        final: Folder of the checkpoint.
        nonce: Random name of the staging directory, the same on all ranks.
        share: Part of the checkpoint that this rank writes.
        content: State of the run, in the same order on all ranks.
        about: The manifest's `about` section.
        policy: Options of the save, including which checkpoints are kept.
        source: Object that identifies the run, passed to the listeners that are notified of the commit. Default: None,
            this process's run.
        pending_copies: Copies and events to wait for. The content is complete once they have finished. Default: (),
            nothing to wait for.
        check_sources: Function called when this rank's part has been written. It raises `CheckpointError` if the source
            tensors have changed since the snapshot. Default: a function that does nothing.
        exchange_parts: Function called after `check_sources`, before the commit. It sends this part to other ranks and
            receives theirs. Default: a function that does nothing.
    """

    final: Path
    nonce: str
    share: DiskShare
    content: CollectedState
    about: Mapping[str, Any]
    policy: SavePolicy
    source: object = None
    pending_copies: tuple[PendingCopy, ...] = ()
    check_sources: Callable[[], None] = lambda: None
    exchange_parts: Callable[[], None] = lambda: None

    @property
    def own_names(self) -> frozenset[str]:
        """Names of the unsharded tensors that this rank writes."""
        if self.share.part is None:
            return frozenset()
        files = plan_files(self.content.tensors, self.share.num_parts)[self.share.part]
        return frozenset(name for names in files.values() for name in names)

    @property
    def staging(self) -> Path:
        """Staging directory of the save."""
        return folders.find_store(self.final).get_staging(self.nonce)

    def remove_old_checkpoints(self) -> None:
        """Remove older checkpoints of this run if the policy limits their number. Called after the commit.

        If the checkpoints cannot be listed, only a warning is logged, because the new one is saved.
        """
        if self.policy.keep is None:
            return
        try:
            folders.remove_old_checkpoints(
                self.final.parent,
                self.policy.keep,
                self.policy.protected,
                self.about.get("run"),
                self.final.name.rstrip("0123456789"),
            )
        except (OSError, ObjectStoreError) as error:
            log.warning_once("%s is saved, but older checkpoints could not be listed: %s", self.final, error)
