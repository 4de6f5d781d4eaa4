"""Where a training begins: at the start, from a checkpoint, or where the same command was preempted and has left a mark.

The mark lies beside the checkpoints, `<output_dir>/preempted.json`, from the moment when a run has saved and ends with exit code
75 until the training ends well, or another is begun in its place. A kill in between leaves it, so a job that is preempted and
later killed goes on from its newest checkpoint.
"""

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from headway.accelerator import Accelerator
from headway.checkpoint.folders import committed, run_of
from headway.common import atomic, scope
from headway.common.untrusted import parse_json
from headway.errors import CheckpointError
from headway.log import get_logger
from headway.trainer.records import FOLDER

log = get_logger(__name__)

FILE = "preempted.json"


class TrainingCounts(Counter[str]):
    """How many trainings this process has begun in each folder."""


@dataclass(frozen=True)
class PreemptionMarker:
    """What is known of the training that was asked to end.

    Attributes:
        run: its id, as its checkpoints' manifests have it.
        training: which training of its process in that folder it was, 1 for the first: a script may train several models.
        asked: the folder that it was told to go on from itself; None: it began at the start, or from the newest.
        update: updates made.
    """

    run: str
    training: int
    asked: str | None
    update: int

    def is_meant(self, training: int, asked: str | Path | bool | None) -> bool:
        """Does the same command, at its training number `training`, that asks for `asked`, go on from it?"""
        if asked is False or training != self.training:
            return False
        return asked in (None, True) or str(asked) == self.asked


def begin(output_dir: str | Path) -> int:
    """Count a training of this process in the folder; returns its number, 1 for the first."""
    place = os.path.abspath(output_dir)
    begun = scope.own(TrainingCounts)
    begun[place] += 1
    return begun[place]


def read_marker(output_dir: str | Path) -> PreemptionMarker | None:
    """The folder's mark; None where there is none, or it cannot be read."""
    try:
        return PreemptionMarker(**parse_json((Path(output_dir) / FILE).read_text()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        log.warning("%s cannot be read (%s), so no training is resumed by itself", Path(output_dir) / FILE, error)
        return None


def write_marker(
    output_dir: str | Path, checkpoint: str | Path, training: int, asked: str | Path | bool | None, update: int
) -> None:
    """Write the mark of a training whose checkpoint has just been committed; one process of each machine calls it."""
    run = run_of(Path(checkpoint))
    if run is None:  # this machine's disk does not hold it
        return
    folder = None if asked is None or isinstance(asked, bool) else str(asked)
    path = Path(output_dir) / FILE
    try:
        atomic.write_text(
            path, json.dumps(asdict(PreemptionMarker(run, training, folder, update))) + "\n", has_rivals=True
        )
    except OSError as error:
        log.warning("%s cannot be written (%s): give resume_from_checkpoint=%r to resume", path, error, str(checkpoint))


def remove_marker(output_dir: str | Path, training: int) -> None:
    """Take the mark away, where it is that of the process's training number `training`."""
    mark = read_marker(output_dir)
    if mark is not None and mark.training == training:
        (Path(output_dir) / FILE).unlink(missing_ok=True)


def choose_marker(marks: Sequence[PreemptionMarker | None]) -> PreemptionMarker | None:
    """The mark that all ranks go by, of what each finds on its disk: the first one found."""
    return next((mark for mark in marks if mark is not None), None)


class Continuation:
    """Where one training begins, and what it leaves for the next start of the same command.

    Args:
        output_dir: the run's folder.
        asked: `resume_from_checkpoint` of the call, or of the arguments.
        changed: as for `Accelerator.resume`.

    Attributes:
        training: which training of this process in that folder it is.
    """

    def __init__(
        self, output_dir: str | Path, asked: str | Path | bool | None, changed: str | tuple[str, ...] = ()
    ) -> None:
        self.training = begin(output_dir)
        self._folder = output_dir
        self._asked = asked
        self._changed = changed

    def resume(self, accelerator: Accelerator) -> None:
        """Go on from where the arguments say, or from where the same command was preempted; every rank calls it.

        Raises:
            CheckpointError: the checkpoint is damaged, or does not fit.
        """
        asked = self._asked
        mark = choose_marker(accelerator.collectives.gather_objects(read_marker(self._folder)))
        if mark is not None and mark.is_meant(self.training, asked):
            self._resume_preempted(accelerator, mark)
            return
        self.end_well(accelerator)
        if asked:
            accelerator.resume("latest" if asked is True else asked, changed=self._changed)
        elif accelerator.save_iteration:
            log.info(
                "%s holds checkpoints of earlier runs, which stay; this one's are numbered from %d on. "
                "resume_from_checkpoint=True resumes from the newest",
                self._folder,
                accelerator.save_iteration,
            )

    def _resume_preempted(self, accelerator: Accelerator, mark: PreemptionMarker) -> None:
        log.warning(
            "the run in %s was preempted after update %d and resumes from its newest checkpoint; resume_from_checkpoint=False "
            "starts from the beginning",
            self._folder,
            mark.update,
        )
        try:
            accelerator.resume("latest", run=mark.run, changed=self._changed)
        except CheckpointError as error:
            raise CheckpointError(
                f"{error}\nThe same command was preempted and has to resume; resume_from_checkpoint=False starts from the beginning"
            ) from error

    def preempted(self, accelerator: Accelerator, checkpoint: str | Path, update: int) -> None:
        """The run was asked to end: note where the same command goes on.

        Args:
            accelerator: whose first process on each machine writes.
            checkpoint: just committed.
            update: updates made.
        """
        if self._asked is False:
            log.warning("the next start is from the beginning, as resume_from_checkpoint=False says; True resumes")
        elif accelerator.is_local_main_process:
            write_marker(self._folder, checkpoint, self.training, self._asked, update)

    def end_well(self, accelerator: Accelerator) -> None:
        """Nothing is left to go on with: a mark of an earlier start is taken away."""
        if accelerator.is_local_main_process:
            remove_marker(self._folder, self.training)


def check_folder(accelerator: Accelerator, asked: str | Path | bool | None, output_dir: str | Path) -> None:
    """Is the folder to resume from there? One machine that has it is enough; every rank calls it.

    Raises:
        CheckpointError: saying what is there instead.
    """
    if asked is not None and not isinstance(asked, bool):
        told = accelerator.collectives.gather_objects(missing_checkpoint(asked, output_dir))
        if all(told):
            raise CheckpointError(str(told[0]))


def missing_checkpoint(asked: str | Path, output_dir: str | Path) -> str | None:
    """Why nothing can be resumed from there, in a sentence; None where it seems to be a checkpoint.

    Args:
        asked: `resume_from_checkpoint`, a folder.
        output_dir: the run's, whose checkpoints are named.
    """
    folder = Path(asked)
    if folder.is_dir() and not committed(folder / FOLDER) and not (folder / "trainer_state.json").is_file():
        return None
    there = committed(folder / FOLDER) or committed(Path(output_dir) / FOLDER)
    known = (
        f"{there[0].parent} holds {', '.join(path.name for path in there[:5])}"
        if there
        else "this run has no checkpoint"
    )
    if not folder.exists():
        what = "does not exist"
    elif committed(folder / FOLDER):
        what = "is a run's folder, not a checkpoint"
    elif folder.is_dir():
        what = "is a checkpoint of transformers, which cannot be resumed; take its weights with from_pretrained"
    else:
        what = "is a file; a checkpoint is a folder"
    return f"resume_from_checkpoint={str(asked)!r} {what}; {known}; True resumes from the newest"
