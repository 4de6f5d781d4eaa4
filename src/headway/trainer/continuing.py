"""The mark that a preempted training leaves, by which the same command resumes it.

It lies beside the checkpoints, `<output_dir>/preempted.json`, from the moment when a run has saved and ends with exit code
75 until the training ends well, or another is begun in its place. A kill in between leaves it, so a job that is preempted and
later killed goes on from its newest checkpoint.
"""

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from headway.checkpoint.folders import run_of
from headway.log import get_logger

log = get_logger(__name__)

FILE = "preempted.json"
_num_begun: Counter[str] = Counter()


@dataclass(frozen=True)
class Mark:
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
    _num_begun[place] += 1
    return _num_begun[place]


def read_mark(output_dir: str | Path) -> Mark | None:
    """The folder's mark; None where there is none, or it cannot be read."""
    try:
        return Mark(**json.loads((Path(output_dir) / FILE).read_text()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        log.warning("%s cannot be read (%s), so no training is resumed by itself", Path(output_dir) / FILE, error)
        return None


def leave_mark(output_dir: str | Path, checkpoint: str | Path, training: int, asked: str | Path | bool | None,
               update: int) -> None:  # fmt: skip
    """Write the mark of a training whose checkpoint has just been committed; one process of each machine calls it."""
    run = run_of(Path(checkpoint))
    if run is None:  # this machine's disk does not hold it
        return
    folder = None if asked is None or isinstance(asked, bool) else str(asked)
    path = Path(output_dir) / FILE
    scratch = path.with_name(f".{FILE}.{os.getpid()}")
    try:
        scratch.write_text(json.dumps(asdict(Mark(run, training, folder, update))) + "\n")
        os.replace(scratch, path)
    except OSError as error:
        log.warning("%s cannot be written (%s): give resume_from_checkpoint=%r to resume", path, error, str(checkpoint))


def remove_mark(output_dir: str | Path, training: int) -> None:
    """Take the mark away, where it is that of the process's training number `training`."""
    mark = read_mark(output_dir)
    if mark is not None and mark.training == training:
        (Path(output_dir) / FILE).unlink(missing_ok=True)


def agreed(marks: Sequence[Mark | None]) -> Mark | None:
    """The mark that all ranks go by, of what each finds on its disk: the first one found."""
    return next((mark for mark in marks if mark is not None), None)
