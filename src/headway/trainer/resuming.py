"""Choice of the checkpoint from which a Trainer's run resumes, and the marker file of a preempted run.

A preempted run saves, writes the marker file `<output_dir>/preempted.json` and exits with code 75. The marker remains
until training ends normally or another training run starts instead. A kill in between does not remove it, so a
job that is preempted and later killed resumes from its newest checkpoint.
"""

import json
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from headway.accelerator import Accelerator
from headway.common import atomic, scope
from headway.common.object_path import to_path
from headway.common.untrusted import parse_json
from headway.core.checkpoint.folders import list_committed, read_run_id
from headway.errors import CheckpointError, ObjectStoreError
from headway.log import get_logger
from headway.trainer.checkpoints import FOLDER

log = get_logger(__name__)

MARKER_FILE = "preempted.json"
"""Name of the marker file of a preempted run, in `output_dir`."""


class TrainingCounts(Counter[str]):
    """Registry of the number of training runs that this process has started, by output folder."""


@dataclass(frozen=True)
class PreemptionMarker:
    """Content of the marker file of a preempted training run, which the next start of the same command reads.

    Attributes:
        run: ID of the run, as in its checkpoints' manifests.
        training: Position of the training run among those that its process started with this output folder. The first
            one is 1.
        asked: Folder given as `resume_from_checkpoint`. None: the run started from the beginning, or from the
            newest checkpoint.
        update: Number of completed updates.
    """

    run: str
    training: int
    asked: str | None
    update: int

    def is_for_start(self, training: int, requested: str | Path | bool | None) -> bool:
        """Whether a starting training run should continue the preempted run that wrote this marker.

        This is the case if the positions are equal, and `resume_from_checkpoint` is None, True, or the folder from
        which the preempted run itself was resumed.

        Args:
            training: Position of the starting run among those that its process started with this output folder. The
                first one is 1.
            requested: `resume_from_checkpoint` of the starting run. None if it was not given.
        """
        if requested is False or training != self.training:
            return False
        return requested in (None, True) or str(requested) == self.asked


def count_training(output_dir: str | Path) -> int:
    """Count a new training run of this process with an output folder, and return the number of such runs so far."""
    place = str(to_path(output_dir).resolve())
    counts = scope.get_or_create(TrainingCounts)
    counts[place] += 1
    return counts[place]


def read_marker(output_dir: str | Path) -> PreemptionMarker | None:
    """Return the preemption marker in an output folder, or None if there is no marker or it cannot be read."""
    path = to_path(output_dir) / MARKER_FILE
    try:
        return PreemptionMarker(**parse_json(path.read_text()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        log.warning("%s cannot be read (%s), so no training is resumed automatically", path, error)
        return None


class ResumeDecision:
    """Decision about the checkpoint from which a training run starts.

    If the run is preempted, this object writes a marker file, which the next start of the command reads.

    Args:
        output_dir: Folder of the run.
        requested: `resume_from_checkpoint` of the call or of the arguments.
        changed: Differences from the checkpoint that are intended, such as "data"; see `Accelerator.resume`.
            Default: none.

    Attributes:
        training: Position of this training run among those that its process started with this output folder. The first
            one is 1.
    """

    def __init__(
        self, output_dir: str | Path, requested: str | Path | bool | None, changed: str | tuple[str, ...] = ()
    ) -> None:
        self.training = count_training(output_dir)
        self._folder = output_dir
        self._requested = requested
        self._changed = changed

    def resume(self, accelerator: Accelerator) -> None:
        """Resume from the newest checkpoint of the preempted run, or else from the requested checkpoint.

        The preempted run is resumed if a marker file shows that this command was preempted. Otherwise the marker file
        is removed. Without a request, the run then starts from the beginning. Every rank must call it.

        Raises:
            CheckpointError: If the checkpoint is damaged or does not fit this run.
        """
        requested = self._requested
        markers = accelerator.collectives.gather_objects(read_marker(self._folder))
        marker = next(filter(None, markers), None)  # machines can have disks of their own
        if marker is not None and marker.is_for_start(self.training, requested):
            self._resume_from_marker(accelerator, marker)
            return
        self.remove_marker(accelerator)
        if requested:
            accelerator.resume("latest" if requested is True else requested, changed=self._changed)
        elif accelerator.save_iteration:
            log.info(
                "%s contains checkpoints of earlier runs, which are kept. The checkpoints of this run are numbered from %d on. "
                "resume_from_checkpoint=True resumes from the newest",
                self._folder,
                accelerator.save_iteration,
            )

    def _resume_from_marker(self, accelerator: Accelerator, marker: PreemptionMarker) -> None:
        """Resume a run that was preempted from its newest checkpoint.

        Args:
            accelerator: Accelerator of the run.
            marker: Marker that the preempted run has left.

        Raises:
            CheckpointError: If the checkpoint cannot be loaded.
        """
        log.warning(
            "the run in %s was preempted after update %d and resumes from its newest checkpoint; resume_from_checkpoint=False "
            "starts from the beginning",
            self._folder,
            marker.update,
        )
        try:
            accelerator.resume("latest", run=marker.run, changed=self._changed)
        except CheckpointError as error:
            raise CheckpointError(
                f"{error}\nThe same command was preempted and has to resume; resume_from_checkpoint=False starts from the beginning"
            ) from error

    def write_marker(self, accelerator: Accelerator, checkpoint: str | Path, update: int) -> None:
        """Write the marker file after a preempted run has saved a checkpoint.

        With `resume_from_checkpoint=False`, only log that the next start is from the beginning. If the file cannot be
        written, log a warning.

        Args:
            accelerator: Accelerator of the run. The first process on each machine writes.
            checkpoint: Checkpoint that was just committed.
            update: Number of completed updates.
        """
        if self._requested is False:
            log.warning("the next start is from the beginning, because of resume_from_checkpoint=False; True resumes")
        elif accelerator.is_local_main_process and (run := read_run_id(to_path(checkpoint))) is not None:
            # `read_run_id` returns None if this machine's disk does not have the checkpoint.
            is_folder = self._requested is not None and not isinstance(self._requested, bool)
            marker = PreemptionMarker(run, self.training, str(self._requested) if is_folder else None, update)
            path = to_path(self._folder) / MARKER_FILE
            try:
                atomic.write_text(path, json.dumps(asdict(marker)) + "\n", has_other_writers=True)
            except (OSError, ObjectStoreError) as error:
                log.warning(
                    "%s cannot be written (%s): give resume_from_checkpoint=%r to resume", path, error, str(checkpoint)
                )

    def remove_marker(self, accelerator: Accelerator) -> None:
        """Remove the marker file that this training run wrote when it was preempted at an earlier start of the command.

        This is called when the run has ended normally, or does not continue the preempted run. The first process on
        each machine removes the file. Markers of other training runs of the command are kept.
        """
        if accelerator.is_local_main_process:
            marker = read_marker(self._folder)
            if marker is not None and marker.training == self.training:
                (to_path(self._folder) / MARKER_FILE).unlink(missing_ok=True)


def check_folder(accelerator: Accelerator, requested: str | Path | bool | None, output_dir: str | Path) -> None:
    """Raise an error if no rank finds the checkpoint to resume from. Every rank must call this.

    Args:
        accelerator: Accelerator whose ranks take part.
        requested: Value of `resume_from_checkpoint`. Only a folder is checked, not None, True or False.
        output_dir: Folder of the run, whose checkpoints the message lists.

    Raises:
        CheckpointError: If the folder is a checkpoint on no rank: it is missing, a file, the folder of a whole run, or
            a checkpoint of transformers.
    """
    if requested is not None and not isinstance(requested, bool):
        problems = accelerator.collectives.gather_objects(explain_missing_checkpoint(requested, output_dir))
        if all(problem is not None for problem in problems):
            raise CheckpointError(str(problems[0]))


def explain_missing_checkpoint(requested: str | Path, output_dir: str | Path) -> str | None:
    """Return the reason why a folder cannot be resumed from, or None if it looks like a checkpoint.

    Args:
        requested: Folder given as `resume_from_checkpoint`.
        output_dir: Folder of the run, whose checkpoints the message lists.
    """
    folder = to_path(requested)
    if folder.is_dir() and not list_committed(folder / FOLDER) and not (folder / "trainer_state.json").is_file():
        return None
    saved = list_committed(folder / FOLDER) or list_committed(to_path(output_dir) / FOLDER)
    if saved:
        existing = f"{saved[0].parent} holds {', '.join(path.name for path in saved[:5])}"
    else:
        existing = "this run has no checkpoint"
    if not folder.exists() and not folder.is_dir():
        problem = "does not exist"
    elif list_committed(folder / FOLDER):
        problem = "is a run's folder, not a checkpoint"
    elif folder.is_dir():
        problem = "is a checkpoint of transformers, which cannot be resumed; take its weights with from_pretrained"
    else:
        problem = "is a file; a checkpoint is a folder"
    return f"resume_from_checkpoint={str(requested)!r} {problem}; {existing}; True resumes from the newest"
