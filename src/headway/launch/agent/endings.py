"""Reports of the end of a run: the first failure, a lost machine, a hang or an abort.

Each report is printed once on the screen and also written to failure.json, where other programs can read it. It begins
with the failure that occurred first.
"""

import json
import os
import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headway.common import atomic
from headway.common.text import format_ranges
from headway.common.tracebacks import remove_backend_noise, shorten_crash
from headway.core.runtime.preempted_run import PreemptedRun
from headway.launch.agent.records import RankExit
from headway.launch.watch import report
from headway.launch.watch.hang_watch import DiagnosedHang

_EXIT_REASONS = {
    -signal.SIGKILL: "; the kernel's counters show no out-of-memory kill, so a person, a scheduler or a container's limit "
    "sent it",
    -signal.SIGTERM: ", which was sent from outside of this run",
    -signal.SIGABRT: (
        ": a library gave up, and its own message is further up. gloo and NCCL do so where ranks make different collectives, such "
        "as a call on a sharded model under `if accelerator.is_main_process:`, or losses that ranks computed with different models"
    ),
}
"""Explanation of a rank's death by exit code (-n for signal n), appended to the description of the rank."""


@dataclass(frozen=True)
class FailureReport:
    """Report of the failures that ended the ranks after one start.

    Attributes:
        deaths: Exit records of the ranks that failed or wrote an exception record. They cover one machine or, after
            merging, all machines.
        world_size: Number of processes on all machines.
        memory: Description of kills by the kernel's out-of-memory killer. Empty if there were none.
        finished: Ranks that had reached the end of their script.
        is_printed_by_rank_0: Whether rank 0's agent prints the full report on the screen that this agent also prints to.
    """

    deaths: tuple[RankExit, ...]
    world_size: int
    memory: str = ""
    finished: tuple[int, ...] = ()
    is_printed_by_rank_0: bool = False

    @property
    def first(self) -> RankExit:
        """Exit record of the first failure. The other failures are assumed to be consequences of it."""
        return min(self.deaths, key=lambda death: death.sort_key)

    @property
    def exit_code(self) -> int:
        """Exit code of the run: that of the rank that failed first, or 128 + n if signal n ended that rank.

        1 if this rank has recorded an exception, but has no exit code or exit code 0.
        """
        code = self.first.exit_code or 1
        return code if code > 0 else 128 - code

    def format_headline(self) -> str:
        """Return a sentence that describes the first failure. It is also sent to the other machines."""
        first = self.first
        return f"rank {first.rank} of {self.world_size} failed first{_format_place(first)} ({first.describe()})"

    @property
    def is_consequence(self) -> bool:
        """Whether every rank in `deaths` has recorded an exception that only reports that another rank was lost."""
        return all(death.record is not None and death.record.is_consequence for death in self.deaths)

    def format_text(self) -> str:
        """Return the report as text for the screen. If rank 0's agent prints the full report there, return one line."""
        first = self.first
        place = _format_place(first)
        if self.is_printed_by_rank_0:
            return f"headway: rank {first.rank} on host {first.host} failed first{place}; its report is with rank 0's output"
        process = f"host {first.host}, pid {first.pid}"
        if first.progress:
            process += f", {first.progress}"
        lines = [f"headway: rank {first.rank} of {self.world_size} failed first{place} ({process})"]
        if self.finished and first.record is not None and first.record.is_consequence:
            finished = f"rank{'s' if len(self.finished) > 1 else ''} {format_ranges(self.finished)}"
            lines.append(
                f"headway: {finished} had finished the script by then, so the others waited in vain: give all ranks "
                "the same number of steps and collectives"
            )
        if first.record is not None:
            lines.append((first.record.shown or remove_backend_noise(first.record.trace)).rstrip())
        else:
            lines.append(f"headway: rank {first.rank} was {first.describe()}{self._explain_death(first)}")
            if first.crash:
                lines.append(shorten_crash(first.crash).rstrip())
        lines += self._describe_others(first)
        return "\n".join(lines)

    def _explain_death(self, death: RankExit) -> str:
        """Return the likely reason of an exit without an exception, to append to a sentence. Empty if unknown."""
        if death.exit_code == -signal.SIGKILL and self.memory:
            return f": {self.memory}"
        return _EXIT_REASONS.get(death.exit_code or 0, "")

    def _describe_others(self, first: RankExit) -> list[str]:
        """Return lines about all ranks except the one that failed first.

        They name the ranks that failed in the same way, then those that failed in another way, then the number of ranks
        that the agents have ended.
        """
        others = sorted((death for death in self.deaths if death is not first), key=lambda death: death.rank)
        same_ranks = [death.rank for death in others if _is_same_failure(death, first)]
        consequences = [death for death in others if death.rank not in same_ranks and not death.was_ended_by_agent]
        lines = []
        if same_ranks:
            lines.append(f"headway: the same on rank{'s' if len(same_ranks) > 1 else ''} {format_ranges(same_ranks)}")
        lines += describe_consequences(consequences, self.world_size, first.rank)
        num_ended = self.world_size - 1 - len(same_ranks) - len(consequences) - len(self.finished)
        if num_ended > 0:
            have = "processes have" if num_ended > 1 else "process has"
            lines.append(f"headway: the other {num_ended} {have} been ended")
        return lines

    def write(self, path: Path) -> None:
        """Write failure.json: the first failure, the exit records in `deaths`, the run's size and exit code, and kills.

        Kills are those by the kernel when memory ran out.

        Args:
            path: Path of failure.json. Its folder is created if necessary.
        """
        content = {
            "world_size": self.world_size,
            "exit_code": self.exit_code,
            "memory": self.memory,
            "first": asdict(self.first),
            "ranks": [asdict(death) for death in self.deaths],
        }
        write_json(path, content)


@dataclass(frozen=True)
class MachineLost:
    """Report of a lost machine. Failures on this machine are consequences of the loss.

    Attributes:
        loss: Sentence that names the lost machine.
        machine_rank: Rank of this machine.
        report: Failures of this machine's ranks. None if none of them has failed.
        exit_code: Exit code of the run.
        unit: Word for a machine in the report: "machine", or "task" if each process has its own launcher.
        former_file: Identity (`read_file_identity`) of the failure.json that existed when the ranks were last started.
            None if there was none.
    """

    loss: str
    machine_rank: int
    report: FailureReport | None = None
    exit_code: int = 1
    unit: str = "machine"
    former_file: tuple[int, int] | None = None

    def format_headline(self) -> str:
        """Return the sentence that names the lost machine."""
        return self.loss

    def format_text(self) -> str:
        """Return the report as text for the screen."""
        lines = [f"headway: {self.loss}"]
        if self.report is not None:
            lines += describe_consequences(self.report.deaths, self.report.world_size)
        return "\n".join([*lines, f"headway: {self.unit} {self.machine_rank} has ended its processes"])

    def write(self, path: Path) -> None:
        """Write failure.json with the lost machine and the failed ranks.

        Do nothing if the file was already written since the ranks were last started: in a shared folder, it may be the
        lost machine's own report. An older file is replaced.
        """
        if read_file_identity(path) not in (None, self.former_file):
            return
        deaths = self.report.deaths if self.report is not None else ()
        content = {
            "lost_machine": self.loss,
            "exit_code": self.exit_code,
            "ranks": [asdict(death) for death in deaths],
        }
        write_json(path, content)


@dataclass(frozen=True)
class RunEnded:
    """Report of a run that ended without a failed rank: a rank aborted it, or some ranks ended before they joined it.

    It is also used if torch's agent reports a failure for which no machine has reported a reason.

    Attributes:
        reason: Sentence that explains the end.
        world_size: Number of processes on all machines.
    """

    reason: str
    world_size: int

    @property
    def exit_code(self) -> int:
        """Exit code of the run: always 1, because there is no exit code of a failed rank to use."""
        return 1

    def format_headline(self) -> str:
        """Return a sentence with the reason why the run was ended."""
        return self.reason

    def format_text(self) -> str:
        """Return the report as text for the screen."""
        return f"headway: {self.reason}\nheadway: all {self.world_size} ranks have been ended"

    def write(self, path: Path) -> None:
        """Write failure.json with the reason why the run was ended and an empty list of failed ranks."""
        content = {"world_size": self.world_size, "exit_code": self.exit_code, "reason": self.reason, "ranks": []}
        write_json(path, content)


@dataclass(frozen=True)
class HangReport:
    """Report of a hung run whose ranks the launcher has ended.

    Attributes:
        hang: Diagnosis of the hang, and the stacks of this machine's ranks.
        unkillable_pids: Process IDs of ranks on this machine that could not be killed, because they wait for a disk.
    """

    hang: DiagnosedHang
    unkillable_pids: tuple[int, ...] = ()

    @property
    def exit_code(self) -> int:
        """Exit code of the run: always 1, because there is no exit code of a failed rank to use."""
        return 1

    def format_headline(self) -> str:
        """Return a sentence that describes the hang."""
        return report.format_headline(self.hang.verdict)

    def format_text(self) -> str:
        """Return the report as text for the screen."""
        end = f"all {self.hang.verdict.world_size} ranks have been ended"
        if self.unkillable_pids:
            pids = ", ".join(map(str, self.unkillable_pids))
            end = (
                f"pid {pids} cannot be killed, even by SIGKILL, until its disk answers; all other ranks have been ended"
            )
        return "\n".join(["headway: " + report.format_report(self.hang.verdict), f"headway: {end}"])

    def write(self, path: Path) -> None:
        """Write failure.json with the hang and the stack of every waiting or missing rank.

        For the ranks of this machine, the file contains the stacks of all threads.
        """
        stacks_by_rank = {str(rank): text for rank, text in self.hang.dumps.items()}
        hang = {**report.encode_diagnosis(self.hang.verdict), "threads": stacks_by_rank}
        content = {"world_size": self.hang.verdict.world_size, "exit_code": self.exit_code, "hang": hang, "ranks": []}
        write_json(path, content)


Report = FailureReport | MachineLost | RunEnded | HangReport | PreemptedRun
"""Any report of how the ranks ended after one start."""


def _format_place(death: RankExit) -> str:
    """Return the line of the script at which a rank failed, to append to a sentence. Empty if unknown."""
    return f", at {death.line}" if death.line else ""


def describe_consequences(deaths: Sequence[RankExit], world_size: int, first: int | None = None) -> list[str]:
    """Return lines of text about the ranks that failed after the first failure, or after a machine was lost.

    Each failed rank has its own line of text, except that ranks that lost their connection at the same place in the
    script share a line.

    Args:
        deaths: Exit records of the failed ranks.
        world_size: Number of processes in the run. In a run of two processes, the text names the rank to which a
            connection was lost.
        first: Rank that failed first, or None if a machine was lost.
    """
    disconnected_ranks: dict[str, list[int]] = {}  # by place in the script
    line_by_rank: dict[int, str] = {}
    for death in sorted(deaths, key=lambda each: each.rank):
        place = f" ({death.line})" if death.line else ""
        if death.record is not None and death.record.is_lost_connection:
            disconnected_ranks.setdefault(place, []).append(death.rank)
        else:
            line_by_rank[death.rank] = f"headway: then rank {death.rank}: {death.describe()}{place}"
    other = f"rank {first}" if world_size == 2 and first is not None else "the others"
    for place, ranks in disconnected_ranks.items():
        noun, its = ("ranks", "their") if len(ranks) > 1 else ("rank", "its")
        text = f"headway: {noun} {format_ranges(ranks)} then lost {its} connection to {other}{place}"
        line_by_rank[ranks[0]] = text
    return [line_by_rank[rank] for rank in sorted(line_by_rank)]


def _is_same_failure(one: RankExit, other: RankExit) -> bool:
    """Whether two ranks raised the same kind of exception at the same line, or ended with the same exit code without one.

    Exceptions that only report that another rank was lost do not count as the same failure.
    """
    if one.record is None or other.record is None:
        return one.record is other.record and one.exit_code == other.exit_code and one.exit_code is not None
    return (one.record.kind, one.line) == (other.record.kind, other.line) and not one.record.is_consequence


def read_file_identity(path: Path) -> tuple[int, int] | None:
    """Return the inode number and modification time (ns) of a file, or None if it does not exist.

    `write_json` changes them, because it replaces the file.
    """
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write failure.json atomically, creating its folder if necessary."""
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic.write_text(path, json.dumps(content, indent=2) + "\n")
