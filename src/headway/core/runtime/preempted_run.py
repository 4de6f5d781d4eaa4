"""Record of a preempted run's checkpoint, which a rank writes and the launcher reads."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from headway.common import atomic
from headway.errors import PREEMPTED


@dataclass(frozen=True)
class PreemptedRun:
    """Record of a preempted run's checkpoint, which a rank writes for the launcher before it exits.

    Attributes:
        reason: Source of the preemption request, such as the name of a signal.
        update: Number of completed updates.
        checkpoint: Path of the directory of the committed checkpoint.
    """

    reason: str
    update: int
    checkpoint: str

    @property
    def exit_code(self) -> int:
        """Exit code of a preempted run (`PREEMPTED`)."""
        return PREEMPTED

    def format_text(self) -> str:
        """Return the report of two lines that the launcher prints about the preempted run."""
        return (
            f"headway: preempted by {self.reason} after update {self.update}; checkpoint {self.checkpoint}\n"
            f"headway: exit code {PREEMPTED}: run the same command again to continue from it"
        )

    def write(self, record: str | Path) -> None:
        """Write this record next to the rank's exception record, where the launcher reads it.

        Args:
            record: Path of the rank's exception record.
        """
        atomic.write_text(_get_note_path(record), json.dumps(asdict(self)))


def find_preempted(record: str | Path) -> PreemptedRun | None:
    """Return the preemption record of a rank, or None if the rank has written none.

    Args:
        record: Path of the rank's exception record.
    """
    try:
        return PreemptedRun(**json.loads(_get_note_path(record).read_text()))
    except FileNotFoundError:
        return None


def _get_note_path(record: str | Path) -> Path:
    """Return the path of the file in which a preempted run leaves a note, next to its record."""
    return Path(f"{record}.preempted")
