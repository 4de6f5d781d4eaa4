"""Carries a plan out: the launcher's process becomes the script, or the agent that keeps several workers."""

import os
import sys
from collections.abc import Mapping
from typing import NoReturn

from headway.errors import LaunchError
from headway.launch.plan import LaunchPlan


def execute(plan: LaunchPlan, environment: Mapping[str, str], *, is_quiet: bool = False) -> NoReturn:
    """Replace this process by the plan's command.

    Args:
        plan: what to start.
        environment: the launcher's own variables, which the plan changes.
        is_quiet: leave the banner out.

    Raises:
        LaunchError: the command cannot be found or started.
    """
    if not is_quiet and plan.banner:
        print(plan.banner, file=sys.stderr)
        for note in plan.notes:
            print(f"headway: {note}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    program = plan.argv[0]
    path = program if os.sep in program else _on_path(program)
    if path is None:
        raise LaunchError(
            f"{program!r} is not a program on PATH; give its path, or leave --no_python out to run a Python script"
        )
    try:
        os.execve(path, list(plan.argv), plan.environment(environment))
    except OSError as error:
        raise LaunchError(f"{path} could not be started: {error.strerror or error}") from error


def _on_path(program: str) -> str | None:
    import shutil

    return shutil.which(program)
