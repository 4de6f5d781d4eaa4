"""`headway doctor`: look at this machine, then let the processes of a run meet, measure the links between them, and advise."""

from typing import Any

import click

from headway.cli.launch import settings, start
from headway.cli.options import CONFIG_FILE, GroupedCommand, examples, option, setting_options
from headway.common import env
from headway.config.load import Resolved

_ABOUT = """Find out why a run does not start, hangs or crawls.

First this machine is looked at: versions, devices, host name, interfaces, ports, limits. Then the processes that `headway launch`
would start with the same flags meet (two on the CPU where it would start one), compare versions, clocks and the working folder, and
measure an all-reduce. Each finding comes with what to do. The exit code is 0 if nothing bad was found. On several machines give each
the same command as to `headway launch`; under SLURM, `srun headway doctor`.
"""

_EPILOG = examples(
    "headway doctor                          this machine",
    "headway doctor -n 8                     and the links between 8 of its processes",
    "headway doctor --here                   this machine only, nothing is started",
    "srun -N 4 headway doctor                four machines of a SLURM cluster",
)


def _doctor(config_file: str | None, here: bool, **given: Any) -> None:
    # Imported here so that the help does not wait for it.
    from headway.cli.checks import doctor
    from headway.launch import clusters

    environment = env.snapshot()
    cluster = clusters.detect(environment)
    resolved = settings(given, config_file, False, environment, cluster.layer if cluster is not None else {})
    num_bad = 0
    is_first = cluster is None or cluster.task is None or cluster.task.local_rank == 0
    for finding in doctor.look(environment, _run(resolved)) if is_first else ():
        click.echo(finding.text())
        num_bad += finding.level == "bad"
    if here:
        click.get_current_context().exit(1 if num_bad else 0)
    if not _starts_several(resolved, environment):
        given = {**given, "num_processes": 2, "cpu": True}
    more = {"module": True, "no_python": None, "quiet": True}
    start("headway.cli.checks.fabric", ("--bad", str(num_bad)), config_file, False, False, **{**given, **more})


def _run(resolved: Resolved) -> Any:
    from headway.cli.checks.doctor import CheckedRun

    return CheckedRun(
        resolved.get("num_machines", 1),
        resolved.get("machine_rank", 0),
        resolved.get("main_process_ip"),
        resolved.get("main_process_port"),
    )


def _starts_several(resolved: Resolved, environment: dict[str, str]) -> bool:
    from headway.launch import machine

    if resolved.get("num_machines", 1) > 1 or resolved.config.is_set("num_processes"):
        return True
    return len(machine.look(environment).device_ids) > 1 and not resolved.get("cpu", False)


def _parameters() -> list[click.Parameter]:
    left_out = ("module", "no_python", "quiet", "log_dir", "tee", "max_restarts", "role", "monitor_interval")
    return [
        *(each for each in setting_options() if each.name not in left_out),
        CONFIG_FILE,
        option("--here", None, "Configuration", "Look at this machine and start nothing."),
    ]


command = GroupedCommand("doctor", callback=_doctor, params=_parameters(), help=_ABOUT, epilog=_EPILOG)
