"""Folder of a run's checkpoints: their names and numbers, the newest one, and conflicts with earlier runs."""

from pathlib import Path
from typing import NamedTuple

from headway.common.object_path import to_path
from headway.core.checkpoint.folders import find_original_name, find_store, list_committed, list_originals, read_run_id
from headway.core.checkpoint.format.foreign import explain_path, find_foreign_checkpoint, parse_number
from headway.core.checkpoint.format.manifest import MANIFEST
from headway.core.checkpoint.loading.reader import CheckpointReader
from headway.core.config.run import ProjectConfiguration
from headway.core.runtime.dry_run import is_dry_run
from headway.errors import CheckpointError, ConfigError
from headway.log import get_logger

log = get_logger(__name__)

FOLDER = "checkpoints"
"""Name of the folder of automatically named checkpoints in the project's directory."""


class EarlierCheckpoint(NamedTuple):
    """Checkpoint of an earlier run.

    Attributes:
        folder: Folder of the checkpoint.
        identity: Pair of numbers that changes if another checkpoint is committed under the same name.
    """

    folder: Path
    identity: tuple[int, int]


class CheckpointFolder:
    """Folder of a run's checkpoints, which names new checkpoints and finds existing ones.

    Args:
        project: Project configuration: directory, naming, and number of checkpoints to keep.
        reader: Reader that finds checkpoints on all ranks together.

    Attributes:
        project: Project configuration. May be replaced.
        iteration: Number of the next automatically named checkpoint.
        conflict: Newest checkpoint that an earlier run saved under a name that this run would use. None if there is no
            such checkpoint, training has begun, or a checkpoint has been loaded.
    """

    def __init__(self, project: ProjectConfiguration, reader: CheckpointReader) -> None:
        self.project = project
        self.iteration = project.iteration
        self._reader = reader
        self._initial_cwd = _get_working_directory()
        self.conflict = self._find_conflict()

    @property
    def is_automatic(self) -> bool:
        """Whether checkpoints are named automatically, by number."""
        return self.project.automatic_checkpoint_naming

    def get_parent(self) -> Path:
        """Return the folder that contains the automatically named checkpoints.

        A relative directory of the project refers to the directory in which the process was when this object was
        created.

        Raises:
            ConfigError: If the project has no directory.
        """
        if self.project.project_dir is None:
            raise ConfigError(
                "automatic checkpoints need a directory: ProjectConfiguration(folder, automatic_checkpoint_naming=True)"
            )
        return (self._initial_cwd / to_path(self.project.project_dir)).absolute() / FOLDER

    # ---------------------------------------------------------------- save

    def get_next_folder(self, output_dir: str | Path | None, is_written_here: bool = True) -> Path:
        """Return the folder of the next checkpoint.

        Args:
            output_dir: Folder that the caller has chosen. Ignored with automatic naming, without which it must not be
                None.
            is_written_here: Whether this rank takes part in the save. Otherwise the checkpoint can exist already, and
                conflicts with earlier runs are not checked. Default: True.

        Raises:
            CheckpointError: With automatic naming, if an earlier run has a checkpoint with the next number or a higher
                one, or a copy that a user made has the next checkpoint's name.
            ConfigError: Without automatic naming, if `output_dir` is None or an address that an object store does not
                allow. With automatic naming, if the project has no directory.
        """
        if not self.is_automatic:
            if output_dir is None:
                raise ConfigError(
                    "save_state() needs a folder; give one, or set ProjectConfiguration(automatic_checkpoint_naming=True)"
                )
            folder = to_path(output_dir).expanduser().absolute()
            find_store(folder).check_name()
            return folder
        conflicts = self._list_conflicts() if is_written_here else []
        if conflicts:
            raise CheckpointError(_explain_conflict(conflicts[0]))
        return self.get_parent() / f"checkpoint_{self.iteration}"

    def _list_conflicts(self) -> list[Path]:
        """Return the existing checkpoints that conflict with the checkpoints that this run will save, newest first.

        A checkpoint conflicts if it has the next checkpoint's number or a higher one, because a resume would take it for
        a newer one. A checkpoint whose name has no number never conflicts. A renamed copy that a user made conflicts only
        if it has exactly the next checkpoint's name.
        """
        numbered = [(parse_number(path), path) for path in list_committed(self.get_parent())]
        later = [path for number, path in numbered if number is not None and number >= self.iteration]
        return [path for path in later if path.name == f"checkpoint_{self.iteration}" or not find_original_name(path)]

    def _find_conflict(self) -> EarlierCheckpoint | None:
        """Return a checkpoint of an earlier run whose name or number automatic checkpoints of this run would reach, or None.

        None if checkpoints are not named automatically.
        """
        if not self.is_automatic or self.project.project_dir is None:
            return None
        conflicts = self._list_conflicts()
        if not conflicts:
            return None
        return EarlierCheckpoint(conflicts[0], find_store(conflicts[0]).read_identity())

    def ensure_resumed(self) -> None:
        """Raise `CheckpointError` if an earlier run's checkpoints have the names that this run will use.

        Called when training begins. Without this check, the error would be raised only at the first save. Only the
        first call checks. A checkpoint that was removed or replaced since this object was created is ignored. In a
        forecast (dry run), nothing is checked.

        Raises:
            CheckpointError: If there are such checkpoints and this run has not resumed.
        """
        if self.conflict is None or is_dry_run():  # a forecast saves nothing and does not resume
            return
        folder, identity = self.conflict
        self.conflict = None
        if (
            folder.parent == self.get_parent()
            and (folder / MANIFEST).exists()
            and find_store(folder).read_identity() == identity
        ):
            raise CheckpointError(_explain_conflict(folder))

    # ---------------------------------------------------------------- find

    def has_checkpoints(self) -> bool:
        """Whether there are automatically named checkpoints that a resume would find."""
        return self.is_automatic and self.project.project_dir is not None and bool(list_originals(self.get_parent()))

    def find_folder_to_load(self, input_dir: str | Path | None) -> Path:
        """Return the folder of the checkpoint to load: `input_dir`, or the newest checkpoint if it is None.

        Whether `input_dir` exists is not checked. If it is None, every rank must call this method.

        Raises:
            CheckpointError: If `input_dir` is None and there is no checkpoint, or `find_newest` raises this error.
            ConfigError: If `input_dir` is None, and checkpoints are not named automatically.
        """
        if input_dir is not None:
            return to_path(input_dir).expanduser().absolute()
        if not self.is_automatic:
            raise ConfigError(
                "load_state() needs a folder; give one, or set ProjectConfiguration(automatic_checkpoint_naming=True)"
            )
        folder = self.find_newest()
        if folder is None:
            raise CheckpointError(f"{self.get_parent()} contains no checkpoint; save_state() writes the first one")
        return folder

    def find_newest(self, run: str | None = None) -> Path | None:
        """Return the newest complete checkpoint, or None if there is none. Every rank must call it.

        The existence and lengths of the files are checked. Their hashes are checked only when the checkpoint is loaded,
        or when it must be copied to machines that have no checkpoint. A warning is logged for each damaged checkpoint.
        A checkpoint that only some of the machines with checkpoints have is ignored without a warning.

        Args:
            run: ID of the run whose checkpoints count. Checkpoints that name no run count, too. Default: None, the
                checkpoints of all runs.

        Raises:
            CheckpointError: If all checkpoints are damaged, if all were written by another program, or if the
                checkpoint cannot be copied to a machine that lacks it. Without `run`, also if there are only copies
                that a user made.
        """
        parent = self.get_parent()
        candidates = [path for path in list_originals(parent) if run is None or read_run_id(path) in (run, None)]
        folder, problems = self._reader.find_first_complete(parent, candidates)
        for problem in problems:
            log.warning_once("skipping a checkpoint: %s", problem)
        if folder is not None:
            return folder
        if problems:
            raise CheckpointError(
                f"{parent} contains {len(problems)} checkpoints, and all of them are damaged:\n  "
                + "\n  ".join(problems)
            )
        copies = list_committed(parent) if run is None else []
        if copies and all(map(find_original_name, copies)):
            raise CheckpointError(
                f"{parent} contains only copies ({copies[0].name} was saved as {find_original_name(copies[0])}), and "
                f"'latest' ignores copies. To continue from a copy, name it: resume('{copies[0]}')"
            )
        foreign = find_foreign_checkpoint(parent)
        if foreign is not None:
            raise CheckpointError(f"{explain_path(foreign)}. To start without it, give another project_dir")
        return None

    def continue_numbering(self, folder: Path, iteration: object) -> None:
        """Continue the numbering of checkpoints after a load. Every rank must call it.

        The next number is larger than the numbers of the loaded checkpoint and of all later checkpoints in the folder.
        Copies that a user made do not count. The number does not change if checkpoints are not named automatically, or
        `iteration` is not an integer.

        Args:
            folder: Folder of the loaded checkpoint.
            iteration: Number of the checkpoint, as recorded in its manifest. It is untrusted.
        """
        self.conflict = None
        if not self.is_automatic or not isinstance(iteration, int):
            return
        # Checkpoints with higher numbers belong to another continuation of the run. New ones must not overwrite them.
        existing = [*list_committed(folder.parent), *list_committed(self.get_parent())]
        newest = iteration
        for path in existing:
            number = parse_number(path) or 0
            if number > newest and not find_original_name(path):
                newest = number
        self.iteration = self._reader.find_largest(newest) + 1


def _get_working_directory() -> Path:
    """Return the current directory, or `Path()` if it was removed.

    The caller stores the result once. Relative folders refer to it even if the script changes the current directory
    between two saves.
    """
    try:
        return Path.cwd()
    except OSError:  # it was removed
        return Path()


def _explain_conflict(earlier: Path) -> str:
    """Return the error message for an existing checkpoint whose name or number this run would use."""
    if name := find_original_name(earlier):
        return f"{earlier} is a copy of {name}, but has the name that the next checkpoint gets. Rename the copy"
    return (
        f"{earlier.parent} already has {earlier.name}, from an earlier run, and this run has not resumed from it. Resume from it "
        "with accelerator.resume('latest') after prepare(), or give another project_dir"
    )
