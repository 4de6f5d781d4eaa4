"""What the agent does next, from what it sees of its ranks and of the other machines: a pure function of a table."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from headway.errors import PREEMPTED


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
