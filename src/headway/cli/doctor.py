"""`headway doctor`: check this machine, measure the links between the processes of a run, and give advice.

`machine_checks.py` checks the machine, and `fabric_checks.py` measures the links between processes.
"""

from typing import Any

import click

from headway.cli.launch import merge_settings, start_script
from headway.cli.machine_checks import CheckedRun, examine_machine
from headway.cli.options import CONFIG_FILE, GroupedCommand, format_examples, make_option, make_setting_options
from headway.common import env
from headway.core.config.load import ResolvedSettings
from headway.launch import machine

_ABOUT = """Find out why a run does not start, hangs or is slow.

First, this machine is checked: versions, devices, host name, network interfaces, ports and limits. Then the processes start that
`headway launch` would start with the same options (or two on the CPU instead of a single one). They connect, compare versions, clocks
and the working folder, and measure an all-reduce. Each finding comes with advice. The exit code is 0 if there is no serious finding.
On several machines, use the same options as for `headway launch` on each; under SLURM, `srun headway doctor`.
"""
_EPILOG = format_examples(
    "headway doctor                          this machine",
    "headway doctor -n 8                     also the connections between 8 processes",
    "headway doctor --here                   this machine only, without starting processes",
    "srun -N 4 headway doctor                four machines of a SLURM cluster",
)


def _run_doctor(config_file: str | None, here: bool, **flag_values: Any) -> None:
    """Examine this machine, then start the processes that test the connections between the ranks.

    Args:
        config_file: Path of the config file. None: the file that `headway config` writes, if it exists.
        here: Whether to examine only this machine, and exit with code 1 if a problem was found.
        **flag_values: Values from the command line by setting name; None if a flag was not given.
    """
    # Imported here so that `--help` does not wait for this import.
    from headway.launch import clusters

    environment = env.copy_variables()
    cluster = clusters.detect_cluster(environment)
    resolved = merge_settings(
        flag_values,
        config_file,
        force=False,
        environment=environment,
        cluster_settings=cluster.layer if cluster is not None else {},
    )
    num_bad = 0
    # In a cluster job with several tasks per machine, one task reports on the machine.
    is_first_task = cluster is None or cluster.task is None or cluster.task.local_rank == 0
    if is_first_task:
        for finding in examine_machine(environment, _read_checked_run(resolved)):
            click.echo(finding.format_text())
            num_bad += finding.level == "bad"
    if here:
        click.get_current_context().exit(1 if num_bad else 0)
    launch_values = {**flag_values, "module": True, "no_python": None, "quiet": True}
    if not _has_several_processes(resolved, environment):
        # A link can only be measured between two processes.
        launch_values.update(num_processes=2, cpu=True)
    start_script("headway.cli.checks", ("doctor", str(num_bad)), config_file, False, False, **launch_values)


def _read_checked_run(resolved: ResolvedSettings) -> CheckedRun:
    """Return the machines and the rendezvous address of a launch with the given settings."""
    return CheckedRun(
        resolved.get("num_machines", 1),
        resolved.get("machine_rank", 0),
        resolved.get("main_process_ip"),
        resolved.get("main_process_port"),
    )


def _has_several_processes(resolved: ResolvedSettings, environment: dict[str, str]) -> bool:
    """Whether a launch starts several processes, or the user chose their number, which the doctor then keeps."""
    if resolved.get("num_machines", 1) > 1 or resolved.config.is_set("num_processes"):
        return True
    return len(machine.inspect_machine(environment).device_ids) > 1 and not resolved.get("cpu", False)


_UNSUPPORTED_OPTIONS = ("module", "no_python", "quiet", "log_dir", "tee", "max_restarts", "role", "monitor_interval")
_PARAMS = [
    *(each for each in make_setting_options() if each.name not in _UNSUPPORTED_OPTIONS),
    CONFIG_FILE,
    make_option("--here", None, "Configuration", "Check only this machine, without starting processes."),
]
command = GroupedCommand("doctor", callback=_run_doctor, params=_PARAMS, help=_ABOUT, epilog=_EPILOG)
