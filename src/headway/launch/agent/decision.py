"""Choice of the agent's next action, as a pure function of the state of its ranks and of the other machines."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from headway.errors import PREEMPTED


class AgentAction(Enum):
    """Next action of the agent: let the ranks continue, or end them, with the reason for ending them."""

    GO_ON = "let the ranks run, or end the run successfully if all have ended"
    END_SAVED = "end the run with exit code 75, because its ranks have saved the requested checkpoint; do not restart"
    END_ABORTED = "end the run, because a rank has aborted it on purpose; do not restart"
    END_HANG = "end a hanging run, including ranks that are suspended"
    END_ALONE = "end this machine's ranks, because another machine has failed or is lost"
    END_FAILED = "end all ranks, because one has failed"


@dataclass(frozen=True)
class AgentSnapshot:
    """State of the run at one of the agent's periodic checks.

    Attributes:
        codes: Exit codes by local rank, for the ranks that have ended.
        has_saved: Whether a rank has recorded that it saved the checkpoint that a preemption requested.
        is_aborted: Whether a rank has ended the run on purpose.
        is_hanging: Whether the hang watch has diagnosed a hang.
        is_alone: Whether another machine has failed or is lost, so that the agent must end the ranks of this machine.
    """

    codes: Mapping[int, int] = field(default_factory=dict)
    has_saved: bool = False
    is_aborted: bool = False
    is_hanging: bool = False
    is_alone: bool = False


def decide_action(snapshot: AgentSnapshot) -> AgentAction:
    """Return the agent's next action.

    A failed rank on this machine has priority over an abort or a hang, because the failure might have caused them.
    """
    codes = set(snapshot.codes.values())
    has_failed = bool(codes - {0})
    if PREEMPTED in codes and snapshot.has_saved and codes <= {0, PREEMPTED}:
        return AgentAction.END_SAVED
    if snapshot.is_aborted and not has_failed:
        return AgentAction.END_ABORTED
    if snapshot.is_hanging and not has_failed:
        return AgentAction.END_HANG
    if snapshot.is_alone:
        return AgentAction.END_ALONE
    return AgentAction.END_FAILED if has_failed else AgentAction.GO_ON
