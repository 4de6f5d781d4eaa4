"""Where a run's checkpoints lie: their folder, their numbers, which is the newest and the best, and what is in the way."""

from pathlib import Path

from headway.checkpoint.folders import about, committed, copy_of, originals, store_of
from headway.checkpoint.format.foreign import explain, foreign_in, number_of
from headway.checkpoint.format.manifest import MANIFEST
from headway.checkpoint.loading.reader import CheckpointReader
from headway.common.object_path import to_path
from headway.config.run import ProjectConfiguration
from headway.errors import CheckpointError, ConfigError
from headway.log import get_logger

log = get_logger(__name__)

FOLDER = "checkpoints"


class CheckpointFolder:
    """Names a run's checkpoints, and finds them again.

    Args:
        project: where, and how many.
        reader: finds checkpoints on all ranks together.

    Attributes:
        project: may be exchanged for another one.
        iteration: the number of the next automatically named checkpoint.
        earlier: the newest checkpoint of an earlier run in this run's way, before it has saved itself, and which file it is.
    """

    def __init__(self, project: ProjectConfiguration, reader: CheckpointReader) -> None:
        self.project = project
        self.iteration = project.iteration
        self._reader = reader
        self._began_in = _working_folder()
        self.earlier = self._find_earlier()

    @property
    def is_automatic(self) -> bool:
        """Are checkpoints named by their numbers?"""
        return self.project.automatic_checkpoint_naming

    def parent(self) -> Path:
        """The folder of automatically named checkpoints.

        Raises:
            ConfigError: the project has no folder.
        """
        if self.project.project_dir is None:
            raise ConfigError(
                "automatic checkpoints need a place: ProjectConfiguration(folder, automatic_checkpoint_naming=True)"
            )
        place = to_path(self.project.project_dir)
        return (self._began_in / place).absolute() / FOLDER

    # ---------------------------------------------------------------- save

    def folder_for(self, output_dir: str | Path | None) -> Path:
        """Where the next checkpoint goes.

        Raises:
            CheckpointError: an earlier run's checkpoint is there.
            ConfigError: no folder was given, and there is no automatic naming.
        """
        if not self.is_automatic:
            if output_dir is None:
                raise ConfigError(
                    "save_state() needs a folder; give one, or set ProjectConfiguration(automatic_checkpoint_naming=True)"
                )
            place = to_path(output_dir).expanduser().absolute()
            store_of(place).check_name()
            return place
        others = self._later_ones()
        if others:
            raise CheckpointError(_used(others[0]))
        return self.parent() / f"checkpoint_{self.iteration}"

    def _later_ones(self) -> list[Path]:
        """Checkpoints with numbers that this run has still to give, newest first."""
        later = [path for path in committed(self.parent()) if (number_of(path) or 0) >= self.iteration]
        # A copy is in the way only where the next one goes.
        return [path for path in later if path.name == f"checkpoint_{self.iteration}" or not copy_of(path)]

    def _find_earlier(self) -> tuple[Path, tuple[int, int]] | None:
        if not self.is_automatic or self.project.project_dir is None:
            return None
        found = self._later_ones()
        return (found[0], store_of(found[0]).identity()) if found else None

    def check_resumed(self) -> None:
        """Training begins: refuse it here, rather than at the first save, where an earlier run's checkpoints are in the way.

        Raises:
            CheckpointError: they are, and nothing was resumed.
        """
        if self.earlier is None:
            return
        (folder, identity), self.earlier = self.earlier, None
        if folder.parent == self.parent() and (folder / MANIFEST).exists() and store_of(folder).identity() == identity:
            raise CheckpointError(_used(folder))

    def best(self, folder: Path, metric: float | None, run: str | None) -> tuple[Path, ...]:
        """The folder of this run's best checkpoint, by the metrics in the manifests; of equal ones the earliest.

        Args:
            folder: of the checkpoint that is about to be saved.
            metric: how good that is.
            run: the run's id.
        """
        wanted = self.project.keep_best
        if wanted is None:
            return ()
        scores = {} if metric is None else {folder: metric}
        for path in committed(folder.parent):
            told = about(path)  # of a damaged one nothing: it is not the best one
            known = told.get("metric")
            is_copy = told.get("name", path.name) != path.name
            if isinstance(known, float) and not is_copy and told.get("run", "") == run:
                scores[path] = known
        if not scores:
            return ()
        sign = -1 if wanted == "max" else 1
        return (min(scores, key=lambda path: (sign * scores[path], number_of(path) or 0)),)

    # ---------------------------------------------------------------- find

    def has_any(self) -> bool:
        """Are there automatically named ones that a resume would find?"""
        return self.is_automatic and self.project.project_dir is not None and bool(originals(self.parent()))

    def to_load(self, input_dir: str | Path | None) -> Path:
        """The checkpoint to take up: that one, or (None) the newest.

        Raises:
            CheckpointError: there is none.
            ConfigError: no folder was given, and there is no automatic naming.
        """
        if input_dir is not None:
            return to_path(input_dir).expanduser().absolute()
        if not self.is_automatic:
            raise ConfigError(
                "load_state() needs a folder; give one, or set ProjectConfiguration(automatic_checkpoint_naming=True)"
            )
        folder = self.newest()
        if folder is None:
            raise CheckpointError(f"{self.parent()} holds no checkpoint; save_state() writes the first one")
        return folder

    def newest(self, run: str | None = None) -> Path | None:
        """The newest checkpoint that verifies, of this run or (None) of any; every rank calls it.

        Raises:
            CheckpointError: there are only damaged ones, copies, or another program's.
        """
        folder, passed_over = self._reader.newest(self.parent(), run)
        for line in passed_over:
            log.warning_once("a checkpoint is passed over: %s", line)
        copies = committed(self.parent()) if folder is None and not passed_over and run is None else []
        if copies and all(map(copy_of, copies)):
            raise CheckpointError(
                f"{self.parent()} holds copies only ({copies[0].name} was saved as {copy_of(copies[0])}), and 'latest' looks "
                f"only at the checkpoints that a run has put there; give the one to go on from: resume('{copies[0]}')"
            )
        foreign = foreign_in(self.parent()) if folder is None else None
        if foreign is not None and not passed_over:
            raise CheckpointError(f"{explain(foreign)}. To start without it, give another project_dir")
        if folder is None and passed_over:
            raise CheckpointError(
                f"{self.parent()} holds {len(passed_over)} checkpoints, and all of them are damaged:\n  "
                + "\n  ".join(passed_over)
            )
        return folder

    def go_on_from(self, folder: Path, iteration: object) -> None:
        """A checkpoint was taken up: number the next one after it, and after all that lie beyond it; every rank calls it.

        Args:
            folder: its folder.
            iteration: its number, as its manifest has it.
        """
        self.earlier = None
        if not self.is_automatic or not isinstance(iteration, int):
            return
        # What lies beyond it was not resumed from, and must not be taken for its continuation.
        there = [*committed(folder.parent), *committed(self.parent())]
        numbers = [(number_of(path) or 0, path) for path in there]
        newest = max((each for each, path in numbers if each > iteration and not copy_of(path)), default=iteration)
        self.iteration = self._reader.largest(max(iteration, newest)) + 1


def _working_folder() -> Path:
    """What a relative folder is relative to from now on: a script may change its working directory between two saves."""
    try:
        return Path.cwd()
    except OSError:  # it was removed
        return Path()


def _used(earlier: Path) -> str:
    if name := copy_of(earlier):
        return f"{earlier} is a copy of {name}, and lies where the next checkpoint goes; give it another name"
    return (
        f"{earlier.parent} already has {earlier.name}, from an earlier run, and this run has not resumed from it. Resume from it "
        "with accelerator.resume('latest') after prepare(), or give another project_dir"
    )
