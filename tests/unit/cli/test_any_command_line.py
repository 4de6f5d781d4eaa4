"""Property test: any command line of `headway launch` gives a valid plan or a clear error, and keeps script arguments."""

import os

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.cli import launch
from headway.core.config.launch import SETTINGS
from headway.errors import ConfigError
from headway.launch.machine import Machine
from headway.launch.order import AgentOrder
from headway.launch.plan import LaunchPlan

EXAMPLES = settings(max_examples=int(os.environ.get("HEADWAY_EXAMPLES", "300")), deadline=None)
MACHINES = st.sampled_from([
    Machine("box", "/bin/python", 8, loopback="lo"),
    Machine("gpubox", "/bin/python", 8, "cuda", ("0", "1"), "lo"),
])  # fmt: skip

words = st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\0"), max_size=8)
flags = st.sampled_from([f"--{name}" for name in SETTINGS] + ["-n", "-m", "-q", "--force", "--use_fsdp", "--nope"])
spelt = st.one_of(flags, flags.map(lambda flag: flag[:2] + flag[2:].replace("_", "-")))
numbers = st.one_of(
    st.integers(-2, 9).map(str), st.sampled_from(["bf16", "fp16", "no", "0,1", "all", "h", "29400", "static"])
)
pieces = st.one_of(spelt, numbers, st.builds("{}={}".format, spelt, numbers), words)


@pytest.mark.slow
@given(st.lists(pieces, max_size=8), st.lists(words, max_size=4), MACHINES)
@EXAMPLES
def test_any_command_line_gives_a_plan_or_a_clear_error(before, after, machine):
    plans: list[LaunchPlan] = []
    patches = {
        "headway.launch.machine.inspect_machine": lambda environment: machine,
        "headway.launch.run.execute_plan": lambda plan, environment, is_quiet: plans.append(plan),
        "headway.launch.run.check_program": lambda program, **options: None,
        "headway.common.env.copy_variables": lambda: {"HEADWAY_HOME": "/nonexistent"},
    }
    result = _invoke_launch([*before, "--", "train.py", *after], patches)
    if result.exception is None and plans:
        _check_plan(plans[0], after)
    elif isinstance(result.exception, ConfigError):
        assert str(result.exception)
    else:
        assert isinstance(result.exception, SystemExit | None), result.exception
        assert result.exit_code in (0, 2)
        assert result.output


def _check_plan(plan: LaunchPlan, after: list[str]) -> None:
    assert plan.world_size >= plan.num_local >= 1
    if plan.argv[1:4] != ("-m", "headway.launch", "agent"):  # one process without an agent
        assert plan.world_size == 1
        found = plan.argv
    else:
        order = AgentOrder.decode(plan.argv[-1])
        assert AgentOrder.decode(order.encode()) == order
        found = order.program.args
    assert list(found)[len(found) - len(after) :] == after


def _invoke_launch(args, patches):
    from unittest.mock import patch

    started = [patch(name, value) for name, value in patches.items()]
    for one in started:
        one.start()
    try:
        return CliRunner().invoke(launch.command, args)
    finally:
        for one in started:
            one.stop()
