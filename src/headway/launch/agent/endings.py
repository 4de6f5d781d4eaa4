"""How a run ends, told once: the first failure first, a lost machine, an end on purpose, a hang; failure.json for machines.

What the agent does next, from what it sees of its ranks and of the other machines: a pure function of a table.
"""

import json
import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from headway.common import atomic
from headway.common.callsite import plain, shorten_crash
from headway.common.text import ranges
from headway.errors import PREEMPTED
from headway.launch.agent.records import PreemptedRun, RankExit
from headway.launch.watch import judge
from headway.launch.watch.hang_watch import Hang

_WHY = {
    -signal.SIGKILL: "; nothing in the kernel's counters says that memory ran out, so a person, a scheduler or a container's limit "
    "sent it",
    -signal.SIGTERM: ", which somebody outside of this run sent",
    -signal.SIGABRT: ": a library gave up, and its own words are further up. gloo and NCCL do so where ranks make different "
    "collectives, such as a call on a sharded model under `if accelerator.is_main_process:`",
}
"""What more there is to say of a rank that such a signal ended."""


@dataclass(frozen=True)
class FailureReport:
    """What ended an attempt.

    Attributes:
        deaths: the ranks of this machine that failed or left a record.
        world_size: processes over all machines.
        memory: what the kernel's counters say about the out-of-memory killer; empty where they say nothing.
        finished: the ranks of this machine that had come to the end of their script.
        is_told_by_rank_0: does the agent of rank 0 tell all of it, on the screen that this one writes to as well?
    """

    deaths: tuple[RankExit, ...]
    world_size: int
    memory: str = ""
    finished: tuple[int, ...] = ()
    is_told_by_rank_0: bool = False

    @property
    def first(self) -> RankExit:
        """The one that everything else follows from."""
        return min(self.deaths, key=lambda death: death.weight)

    @property
    def exit_code(self) -> int:
        """The exit code of the run: the first failure's, 128 + n where signal n ended it."""
        code = self.first.exit_code or 1
        return code if code > 0 else 128 - code

    def headline(self) -> str:
        """The first failure in one sentence, for the other machines."""
        first = self.first
        where = first.line and f", at {first.line}"
        return f"rank {first.rank} of {self.world_size} failed first{where} ({first.what()})"

    @property
    def is_consequence(self) -> bool:
        """Does every rank of this machine only say that others were lost?"""
        return all(death.record is not None and death.record.is_consequence for death in self.deaths)

    def text(self) -> str:
        """The report as people read it."""
        first = self.first
        where = first.line and f", at {first.line}"
        if self.is_told_by_rank_0:
            return f"headway: rank {first.rank} on host {first.host} failed first{where}; its report is with rank 0's output"
        which = f"host {first.host}, pid {first.pid}" + (f", {first.progress}" if first.progress else "")
        lines = [f"headway: rank {first.rank} of {self.world_size} failed first{where} ({which})"]
        if first.record is not None:
            lines.append((first.record.shown or plain(first.record.trace)).rstrip())
        else:
            lines.append(f"headway: rank {first.rank} was {first.what()}{self._why(first)}")
            if first.crash:
                lines.append(shorten_crash(first.crash).rstrip())
        lines += self._others(first)
        if self.finished and first.record is not None and first.record.is_consequence:
            who = f"rank{'s' if len(self.finished) > 1 else ''} {ranges(self.finished)}"
            lines.insert(
                1,
                f"headway: {who} had finished the script by then, so the others waited in vain: give all ranks "
                "the same number of steps and collectives",
            )
        return "\n".join(lines)

    def _why(self, death: RankExit) -> str:
        if death.exit_code == -signal.SIGKILL and self.memory:
            return f": {self.memory}"
        return _WHY.get(death.exit_code or 0, "")

    def _others(self, first: RankExit) -> list[str]:
        others = sorted((death for death in self.deaths if death is not first), key=lambda death: death.rank)
        alike = [death.rank for death in others if _is_alike(death, first)]
        later = [
            one for one in others if one.rank not in alike and (one.record is not None or one.exit_code is not None)
        ]
        lines = []
        if alike:
            lines.append(f"headway: the same on rank{'s' if len(alike) > 1 else ''} {ranges(alike)}")
        lines += consequences(later, self.world_size, first.rank)
        num_ended = self.world_size - len(alike) - len(self.finished) - 1 - len(later)
        if num_ended > 0:
            have = "processes have" if num_ended > 1 else "process has"
            lines.append(f"headway: the other {num_ended} {have} been ended")
        return lines

    def write(self, path: Path) -> None:
        """Write failure.json: the first failure, and every rank's."""
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
    report: FailureReport | None = None
    exit_code: int = 1
    unit: str = "machine"

    def headline(self) -> str:
        """The sentence that names it."""
        return self.machine

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
        write_json(path, content)


@dataclass(frozen=True)
class RunEnded:
    """What is told of a run that a rank, or a broken promise, has ended on purpose."""

    reason: str
    world_size: int

    @property
    def exit_code(self) -> int:
        """1."""
        return 1

    def headline(self) -> str:
        """The reason."""
        return self.reason

    def text(self) -> str:
        """What the screen shows."""
        return f"headway: {self.reason}\nheadway: all {self.world_size} ranks have been ended"

    def write(self, path: Path) -> None:
        """Write failure.json, with the reason in the place of a first failure."""
        content = {"world_size": self.world_size, "exit_code": self.exit_code, "reason": self.reason, "ranks": []}
        write_json(path, content)


@dataclass(frozen=True)
class HangReport:
    """What is told of a run that hung; every rank was ended.

    Attributes:
        hang: who was missing, and the stacks of this machine's ranks.
        left: processes of this machine that could not be ended.
    """

    hang: Hang
    left: tuple[int, ...] = ()

    @property
    def exit_code(self) -> int:
        """1: no rank's own."""
        return 1

    def headline(self) -> str:
        """It in one sentence."""
        return judge.headline(self.hang.verdict)

    def text(self) -> str:
        """What the screen shows."""
        end = f"all {self.hang.verdict.world_size} ranks have been ended"
        if self.left:
            pids = ", ".join(map(str, self.left))
            end = f"the kernel holds pid {pids} until its disk answers, also against SIGKILL; all other ranks have been ended"
        return "\n".join(["headway: " + judge.text(self.hang.verdict), f"headway: {end}"])

    def write(self, path: Path) -> None:
        """Write failure.json: the hang, every rank's stack, and all threads of this machine's ranks."""
        stacks_by_rank = {str(rank): text for rank, text in self.hang.dumps.items()}
        told = {**judge.encode(self.hang.verdict), "threads": stacks_by_rank}
        content = {"world_size": self.hang.verdict.world_size, "exit_code": self.exit_code, "hang": told, "ranks": []}
        write_json(path, content)


Report = FailureReport | MachineLost | RunEnded | HangReport | PreemptedRun
"""How an attempt ended, in whichever way it did."""


def consequences(deaths: Sequence[RankExit], world_size: int, first: int | None = None) -> list[str]:
    """What ranks said after the first failure, or after a machine was lost: a plain line each, the same line once.

    Args:
        world_size: of the run; with two ranks it is clear which connection was lost.
        first: the rank that failed first; None where a machine was lost.
    """
    lost: dict[str, list[int]] = {}
    lines: dict[int, str] = {}
    for death in sorted(deaths, key=lambda one: one.rank):
        where = death.line and f" ({death.line})"
        if death.record is not None and death.record.is_lost_connection:
            lost.setdefault(where, []).append(death.rank)
        else:
            lines[death.rank] = f"headway: then rank {death.rank}: {death.what()}{where}"
    for where, ranks in lost.items():
        other = f"rank {first}" if world_size == 2 and first is not None else "the others"
        who, its = ("ranks", "their") if len(ranks) > 1 else ("rank", "its")
        lines[ranks[0]] = f"headway: {who} {ranges(ranks)} then lost {its} connection to {other}{where}"
    return [lines[rank] for rank in sorted(lines)]


def _is_alike(one: RankExit, other: RankExit) -> bool:
    if one.record is None or other.record is None:
        return one.record is other.record and one.exit_code == other.exit_code and one.exit_code is not None
    return (one.record.kind, one.line) == (other.record.kind, other.line) and not one.record.is_consequence


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write failure.json, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic.write_text(path, json.dumps(content, indent=2) + "\n")


class AgentAction(Enum):
    """What is next."""

    GO_ON = "let the ranks run, or end well"
    END_SAVED = "end a run whose ranks have saved, as they were asked to: no failure, and nothing is restarted"
    END_ABORTED = "end a run that a rank has ended on purpose; nothing is restarted"
    END_HANG = "end a run that hangs, the stopped ranks too"
    END_ALONE = "end the ranks here, as the run has ended on another machine or lost it"
    END_FAILED = "end the other ranks, as one has failed"


@dataclass(frozen=True)
class AgentSnapshot:
    """What the agent sees at one look.

    Attributes:
        codes: exit codes by local rank, of the ranks that have ended.
        has_saved: one of them has left word of the checkpoint that it was asked for.
        is_aborted: the run was ended on purpose, by any rank.
        hangs: the hang watch has a verdict.
        is_alone: another machine has failed, or is lost.
    """

    codes: Mapping[int, int] = field(default_factory=dict)
    has_saved: bool = False
    is_aborted: bool = False
    hangs: bool = False
    is_alone: bool = False


def decide(seen: AgentSnapshot) -> AgentAction:
    """The next step. A rank that failed here says more than a notice or a verdict, which may follow from it."""
    codes = set(seen.codes.values())
    has_failed = bool(codes - {0})
    if PREEMPTED in codes and seen.has_saved and codes <= {0, PREEMPTED}:
        return AgentAction.END_SAVED
    if seen.is_aborted and not has_failed:
        return AgentAction.END_ABORTED
    if seen.hangs and not has_failed:
        return AgentAction.END_HANG
    if seen.is_alone:
        return AgentAction.END_ALONE
    return AgentAction.END_FAILED if has_failed else AgentAction.GO_ON
