"""Lock of the folder into which a run saves, so that only one run at a time writes there."""

from pathlib import Path

from headway.core.checkpoint.folders import find_store
from headway.core.checkpoint.saving.checkpoint_folder import CheckpointFolder
from headway.core.checkpoint.saving.saver import Saver
from headway.core.training.run import Run


class RunLock:
    """Lock of the folder into which one run saves.

    Args:
        saver: Coordinator of saves, which acquires and releases locks.
        run: Run of the Accelerator. It gets the ID that the lock contains.
        checkpoint_folder: Folder of the run's checkpoints.
    """

    def __init__(self, saver: Saver, run: Run, checkpoint_folder: CheckpointFolder) -> None:
        self._saver = saver
        self._run = run
        self._checkpoint_folder = checkpoint_folder
        self._locked_folder: Path | None = None
        """Folder whose lock this run has acquired, or None."""

    def acquire_before_training(self) -> None:
        """Lock the checkpoints' folder before the first training step, to find a conflict with another run early."""
        if self._locked_folder is None:
            self.acquire()

    def acquire(self, is_alone: bool = False, output_dir: str | Path | None = None) -> None:
        """Lock the folder into which this run saves. Runs that only read checkpoints never lock it.

        Automatically named checkpoints lock their parent folder. A folder that the caller names is locked only if its
        store needs a lock, which a disk does not. Every rank must call this method unless `is_alone` is True.

        Args:
            is_alone: Whether only this rank saves. Default: False.
            output_dir: Folder of the checkpoint. Default: None, checkpoints are named automatically.

        Raises:
            CheckpointError: If another run holds the lock.
        """
        checkpoint_folder = self._checkpoint_folder
        if checkpoint_folder.is_automatic:
            if checkpoint_folder.project.project_dir is None:
                return
            folder = checkpoint_folder.get_parent()
        else:
            if output_dir is None:
                return
            folder = checkpoint_folder.get_next_folder(output_dir)
            if not find_store(folder).needs_lock:
                return
        if not checkpoint_folder.is_automatic and self._locked_folder not in (None, folder):
            self.release()
        self._locked_folder = folder
        self._run.run_id = self._saver.lock_folder(folder, self._run.run_id, is_alone)

    def release(self) -> None:
        """Release the lock of the checkpoints' folder if this run holds it."""
        if self._locked_folder is not None:
            self._saver.release_lock(self._locked_folder)
            self._locked_folder = None
