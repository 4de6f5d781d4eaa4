"""Test the agent's next action for every combination of its inputs."""

from itertools import product

import pytest

from headway.errors import PREEMPTED
from headway.launch.agent.decision import AgentAction, AgentSnapshot, decide_action

TABLE = [
    # exit codes of the ranks that have ended, other observations, and the next action
    ([], {}, AgentAction.GO_ON),
    ([0], {}, AgentAction.GO_ON),
    ([0, 0], {}, AgentAction.GO_ON),
    ([0, 0], {"has_saved": True}, AgentAction.GO_ON),
    ([1], {}, AgentAction.END_FAILED),
    ([0, -9], {}, AgentAction.END_FAILED),
    ([PREEMPTED], {"has_saved": True}, AgentAction.END_SAVED),
    ([0, PREEMPTED], {"has_saved": True}, AgentAction.END_SAVED),
    ([PREEMPTED], {"has_saved": True, "is_aborted": True, "is_hanging": True, "is_alone": True}, AgentAction.END_SAVED),
    ([PREEMPTED], {}, AgentAction.END_FAILED),  # the program itself uses this exit code
    ([PREEMPTED, 1], {"has_saved": True}, AgentAction.END_FAILED),
    ([PREEMPTED, 1], {"has_saved": True, "is_alone": True}, AgentAction.END_ALONE),
    ([], {"is_aborted": True}, AgentAction.END_ABORTED),
    ([0], {"is_aborted": True, "is_hanging": True, "is_alone": True}, AgentAction.END_ABORTED),
    ([1], {"is_aborted": True}, AgentAction.END_FAILED),
    ([], {"is_hanging": True}, AgentAction.END_HANG),
    ([0], {"is_hanging": True, "is_alone": True}, AgentAction.END_HANG),
    ([1], {"is_hanging": True}, AgentAction.END_FAILED),
    ([], {"is_alone": True}, AgentAction.END_ALONE),
    ([1], {"is_alone": True}, AgentAction.END_ALONE),
    ([0, 0], {"is_alone": True}, AgentAction.END_ALONE),
]


@pytest.mark.parametrize(("codes", "flags", "step"), TABLE)
def test_agent_decides_by_exit_codes_and_state(codes, flags, step):
    assert decide_action(AgentSnapshot(dict(enumerate(codes)), **flags)) is step


def test_agent_goes_on_only_if_nothing_is_observed():
    names = ("has_saved", "is_aborted", "is_hanging", "is_alone")
    for codes, *flags in product([(), (0,), (1,), (PREEMPTED,), (0, PREEMPTED), (1, PREEMPTED)], *[(False, True)] * 4):
        snapshot = AgentSnapshot(dict(enumerate(codes)), **dict(zip(names, flags)))
        is_quiet = not any(codes) and not (snapshot.is_aborted or snapshot.is_hanging or snapshot.is_alone)
        assert (decide_action(snapshot) is AgentAction.GO_ON) is is_quiet
        assert decide_action(snapshot) is not AgentAction.END_SAVED or (
            snapshot.has_saved and not set(codes) - {0, PREEMPTED}
        )
