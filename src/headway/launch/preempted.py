"""The report of a run that was asked to end: its ranks have saved and ended, which is not a failure."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from headway.errors import PREEMPTED


@dataclass(frozen=True)
class PreemptedRun:
    """What a rank leaves for the launcher before it ends.

    Attributes:
        reason: who asked, and how.
        update: updates that have happened.
        checkpoint: the folder that was committed.
    """

    reason: str
    update: int
    checkpoint: str

    @property
    def exit_code(self) -> int:
        """PREEMPTED."""
        return PREEMPTED

    def text(self) -> str:
        """What the screen shows."""
        return (
            f"headway: preempted by {self.reason} after update {self.update}; checkpoint {self.checkpoint}\n"
            f"headway: exit code {PREEMPTED}: start the same command again, and it goes on from there"
        )

    def leave(self, record: str | Path) -> None:
        """Write it beside the file that is this rank's record of an exception; a launcher reads it there."""
        path = _beside(record)
        scratch = path.with_suffix(".tmp")
        scratch.write_text(json.dumps(asdict(self)))
        scratch.replace(path)


def find(record: str | Path) -> PreemptedRun | None:
    """What the rank with this record has left; None where it has left nothing."""
    try:
        return PreemptedRun(**json.loads(_beside(record).read_text()))
    except FileNotFoundError:
        return None


def _beside(record: str | Path) -> Path:
    return Path(f"{record}.preempted")
