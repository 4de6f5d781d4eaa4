"""GPUs between which direct transfers fail because of an old driver, and the NCCL variables that avoid these transfers.

GeForce RTX 40 cards cannot access each other's memory. With drivers before 550.40.07, NCCL hangs or fails on them unless it is
told to copy through host memory. Accelerate's launcher has the same limit and sets the same two variables.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from headway.common import env
from headway.common.system_files import read_system_file
from headway.log import get_logger

log = get_logger(__name__)

_AFFECTED_CARD = re.compile(r"^Model:\s*(.*GeForce RTX 40\d\d.*?)\s*$", re.MULTILINE)
"""Pattern of the line with an affected card's name in the driver's file about a GPU."""
_DRIVER_VERSION = re.compile(r"^NVRM version:.*?\b(\d+\.\d+(?:\.\d+)?)\b", re.MULTILINE)
_FIRST_GOOD_DRIVER = (550, 40, 7)
_VARIABLES = ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE")


def describe_broken_transfers(root: Path = Path("/")) -> str:
    """Return the card and the driver with which direct transfers between GPUs fail, as "GeForce RTX 4090 with driver 535.54.03".

    Return "" if there is no such card, if the driver is new enough, or if the version of the driver is not known. The
    driver's files in /proc are read. They are missing in WSL, where no card is found.

    Args:
        root: Folder that contains the folder `proc`. Default: "/".
    """
    driver = root / "proc/driver/nvidia"
    names = [
        found[1]
        for path in sorted(driver.glob("gpus/*/information"))
        if (found := _AFFECTED_CARD.search(read_system_file(path)))
    ]
    version = _DRIVER_VERSION.search(read_system_file(driver / "version"))
    if not names or version is None or tuple(map(int, version[1].split("."))) >= _FIRST_GOOD_DRIVER:
        return ""
    return f"{names[0]} with driver {version[1]}"


def choose_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the NCCL variables that avoid direct transfers, without those that are set.

    Args:
        environment: Environment variables of the process.
    """
    return {name: "1" for name in _VARIABLES if name not in environment}


def format_note(problem: str, variables: Mapping[str, str]) -> str:
    """Return a message about the variables that Headway sets.

    Args:
        problem: Result of `describe_broken_transfers`.
        variables: The variables.
    """
    settings = " and ".join(f"{name}={value}" for name, value in variables.items())
    return (
        f"direct transfers between GPUs fail on {problem}, so {settings} {'is' if len(variables) == 1 else 'are'} set, and NCCL "
        "copies through host memory; a driver from 550.40.07 on needs neither"
    )


def avoid_broken_transfers() -> None:
    """Set the NCCL variables in this process if direct transfers fail, and log a warning. Variables that are set are kept.

    `headway launch` sets them before the process starts. This is for processes that another launcher has started.
    """
    problem = describe_broken_transfers()
    variables = choose_variables(env.copy_variables()) if problem else {}
    if variables:
        env.apply_changes(variables)
        log.warning_once("%s", format_note(problem, variables))
