"""The report of a run that ended because another machine was lost: told first, and what the ranks here say of it after."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from headway.launch.exchange import Ended
from headway.launch.failure import Report, consequences
from headway.launch.hang import HangReport


@dataclass(frozen=True)
class Lost:
    """A machine was lost; what failed here is its consequence.

    Attributes:
        machine: the sentence that names it.
        here: this machine's number.
        report: what ended the ranks of this machine; None where the launcher ended them all.
        exit_code: of the run.
        unit: "machine", or "task" where each process has a launcher.
    """

    machine: str
    here: int
    report: Report | None = None
    exit_code: int = 1
    unit: str = "machine"

    def text(self) -> str:
        """What the screen shows."""
        lines = [f"headway: {self.machine}"]
        if self.report is not None:
            lines += consequences(self.report.deaths, self.report.world_size)
        return "\n".join([*lines, f"headway: {self.unit} {self.here} has ended its processes"])

    def write(self, path: Path) -> None:
        """Write failure.json with the lost machine beside the ranks, unless that machine has written its own here."""
        if path.exists():
            return
        deaths = self.report.deaths if self.report is not None else ()
        content = {"lost_machine": self.machine, "exit_code": self.exit_code, "ranks": [asdict(one) for one in deaths]}
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(".tmp")
        scratch.write_text(json.dumps(content, indent=2) + "\n")
        scratch.replace(path)


def is_consequence(report: Report) -> bool:
    """Does every rank of this machine only say that others were lost?"""
    return all(death.record is not None and death.record.is_consequence for death in report.deaths)


def headline(report: Report | Lost | HangReport | Ended) -> str:
    """What ended this machine's part, in one sentence for the other machines."""
    if isinstance(report, Lost):
        return report.machine
    if isinstance(report, HangReport):
        return report.headline()
    if isinstance(report, Ended):
        return report.reason
    first = report.first
    line = f", at {first.record.line}" if first.record is not None and first.record.line else ""
    return f"rank {first.rank} of {report.world_size} failed first{line} ({first.what()})"
