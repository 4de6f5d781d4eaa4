"""`headway launch`: start a script on one or more processes. Its options are the settings in `core.config.launch`."""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import click

from headway.cli.accelerate_flags import VALUE_FLAGS, make_accelerate_options, translate_accelerate_flags
from headway.cli.misplaced_flags import format_misplaced_flags_warning
from headway.cli.options import (
    CONFIG_FILE,
    GroupedCommand,
    format_examples,
    make_option,
    make_script_arguments,
    make_setting_options,
    read_command_line_layer,
)
from headway.common import env
from headway.core.config.launch import EARLIER_NAMES
from headway.core.config.load import ResolvedSettings, SettingValue, merge_layers, read_environment_layer
from headway.core.config.mesh import describe_groups
from headway.errors import ConfigError

_ABOUT = """Run SCRIPT with ARGS, by default in one process per accelerator of this machine.

Options go before SCRIPT, and may be spelled with dashes or underscores. Everything after SCRIPT belongs to the script. If SCRIPT
takes an option of the same name, put `--` before SCRIPT.

Settings in the script take precedence over options, options over HEADWAY_* variables, and variables over the config file. A single
process runs as plain `python SCRIPT`. Several processes are supervised by torch's elastic agent, and the first failure ends all of
them.
"""

_EPILOG = format_examples(
    "headway launch train.py --lr 3e-4              every accelerator, or one CPU process",
    "headway launch -n 2 --cpu train.py             two processes on the CPU",
    "headway launch --gpu_ids 0,3 train.py          two of this machine's GPUs",
    "headway launch -n 4 -m my_package.train        a module",
    "headway launch --strategy fsdp train.py        the model sharded over all processes",
    "headway launch -n 8 --strategy fsdp+tp=2 train.py",
    "headway launch -n 8 --dry-run train.py         print the command only",
    "headway launch -n 16 --num_machines 2 --machine_rank 0 \\",
    "    --main_process_ip 10.0.0.1 --main_process_port 29400 train.py",
)

_TYPED_ARGS_KEY = f"{__name__}.raw"
"""Key under which click's context stores the command line as the user typed it."""


class LaunchCommand(GroupedCommand):
    """Command that stores the command line as the user typed it.

    A warning can then show the corrected command line.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Store the command line, then parse it."""
        ctx.meta[_TYPED_ARGS_KEY] = list(args)
        return super().parse_args(ctx, args)


def _run_launch(**flag_values: Any) -> None:
    """Start the script. Warn if flags of the launcher follow the script's name, because the script gets them."""
    ctx = click.get_current_context()
    start_script(**flag_values, warning=format_misplaced_flags_warning(ctx, ctx.meta[_TYPED_ARGS_KEY]))


def start_script(
    script: str,
    script_args: tuple[str, ...],
    config_file: str | None,
    dry_run: bool,
    force: bool,
    warning: str = "",
    **flag_values: Any,
) -> None:
    """Start `script` with the given settings.

    The launcher replaces this process. With `dry_run`, the command is only printed. If the run needs several machines
    and neither a cluster nor `machine_rank` determines this machine's place, print the command of each machine and exit
    with code 2.

    Args:
        script: Path of a script, name of a module, or program.
        script_args: Arguments of the script.
        config_file: Path of the config file. None: the file that `headway config` writes, if it exists.
        dry_run: Whether to print the command and start nothing.
        force: Whether settings of the command line override those in the script.
        warning: Text to print to standard error before the start. In a cluster job, only one task prints it. Default:
            "", for no warning.
        flag_values: Values from the command line by setting name; None if a flag was not given.

    Raises:
        ConfigError: If settings are invalid or contradict each other, or the script does not exist.
    """
    # Imported here so that `--help` does not wait for these imports.
    from headway.core.runtime import network
    from headway.launch import clusters, machine, plan, run
    from headway.launch.order import Program

    environment = env.copy_variables()
    cluster = clusters.detect_cluster(environment)
    flag_values, accelerate_settings, notes = translate_accelerate_flags(flag_values)
    cluster_settings = cluster.layer if cluster is not None else {}
    with _translate_accelerate_file(config_file, flag_values.get("run_as") is not None, environment) as config_path:
        resolved = merge_settings(flag_values, config_path, force, environment, cluster_settings, accelerate_settings)
    program = Program(script, script_args, _choose_program_kind(resolved))
    run.check_program(program)
    this_machine = machine.inspect_machine(environment)
    if cluster is None and resolved.get("num_machines", 1) > 1 and not resolved.config.is_set("machine_rank"):
        address = network.choose_name_for_others(this_machine.hostname)
        commands = plan.format_commands(resolved, program, address, network.find_free_port())
        has_secret = resolved.config.is_set("secret") or bool(environment.get(env.SECRET))
        _print_commands_and_exit(commands, resolved.get("num_machines", 1), has_secret)
    launch_plan = plan.make_plan(resolved, program, this_machine, environment, cluster, notes)
    if warning and launch_plan.banner:
        click.echo(warning, err=True)
    if dry_run:
        click.echo(f"# {launch_plan.banner}")
        if launch_plan.layout is not None:
            for line in describe_groups(launch_plan.layout):
                click.echo(f"#   {line}")
        for note in launch_plan.notes:
            click.echo(f"# headway: {note}")
        click.echo(launch_plan.format_shell())
        return
    run.execute_plan(launch_plan, environment, is_quiet=resolved.get("quiet", False))


@contextmanager
def _translate_accelerate_file(
    config_file: str | None, runs_as_accelerate: bool, environment: dict[str, str]
) -> Iterator[str | None]:
    """Yield the path of the config file to use, or None if the user gave no path.

    With `--as accelerate`, a config file of Accelerate is translated first. The path of the translation is yielded,
    which is a temporary file that is deleted when the context ends. A file that already has Headway's keys is not
    translated.

    Args:
        config_file: Path that the user gave, or None.
        runs_as_accelerate: Whether to treat the file as `accelerate launch` does, because of `--as accelerate`.
        environment: Environment variables of the launcher. Variables that the file requires are added.
    """
    if config_file is None or not runs_as_accelerate:
        yield config_file
        return
    from headway.compat.accelerate.launching.commands import translate_config_file

    with tempfile.TemporaryDirectory(prefix="headway_") as folder:
        path, variables = translate_config_file(config_file, Path(folder))
        environment.update(variables)
        yield path


def _print_commands_and_exit(commands: list[str], num_machines: int, has_secret: bool) -> NoReturn:
    """Print the command for each machine and exit with code 2. Unless the run has a secret, also print a new one.

    The processes of all machines must have this secret in the environment, to authenticate each other.

    Args:
        commands: Command of each machine. The last machines may be left out.
        num_machines: Number of machines.
        has_secret: Whether the environment contains a secret for the run.
    """
    import secrets

    click.echo(
        "headway: no cluster was detected that starts the other machines. Run one of these commands on each machine:",
        err=True,
    )
    if not has_secret:
        click.echo("# on every machine, first: this secret authenticates the machines to each other (docs/security.md)")
        click.echo(f"export {env.SECRET}={secrets.token_hex(16)}")
    for rank, text in enumerate(commands):
        click.echo(f"# machine {rank}{' (this one)' if rank == 0 else ''}\n{text}")
    if num_machines > len(commands):
        click.echo(f"# ... up to machine {num_machines - 1}, each with its own --machine_rank")
    click.get_current_context().exit(2)


def merge_settings(
    flag_values: dict[str, Any],
    config_file: str | None,
    force: bool,
    environment: dict[str, str],
    cluster_settings: Mapping[str, SettingValue],
    accelerate_settings: Mapping[str, SettingValue] | None = None,
) -> ResolvedSettings:
    """Return the settings of a launch, merged from command line, environment, config file and cluster.

    A source takes precedence over those after it.

    Args:
        flag_values: Values from the command line by setting name; None if a flag was not given.
        config_file: Path of the config file. None: the file that `headway config` writes, if it exists.
        force: Whether settings of the command line override those in the script.
        environment: Environment variables of the launcher.
        cluster_settings: Settings detected from the cluster.
        accelerate_settings: Settings from Accelerate's flags on the command line. Default: none.

    Raises:
        ConfigError: If a setting is unknown or has an invalid value, or the named config file does not exist.
    """
    from headway.compat.accelerate.launching.config_file import explain_file_key
    from headway.core.config.files import read_file_layer

    command_line = {**read_command_line_layer(flag_values), **(accelerate_settings or {})}
    layers = [
        command_line,
        read_environment_layer(environment),
        read_file_layer(config_file, environment, explain_file_key),
        cluster_settings,
    ]
    return merge_layers(layers, force=force)


def _choose_program_kind(resolved: ResolvedSettings) -> str:
    """Return the kind of the program: "module", "program" or "script".

    Raises:
        ConfigError: If the settings request a module and a program that is not Python.
    """
    is_module, is_other_program = resolved.get("module", False), resolved.get("no_python", False)
    if is_module and is_other_program:
        raise ConfigError(
            "--module (a Python module) and --no_python (a program that is not Python) exclude each other; remove one of them"
        )
    if is_module:
        return "module"
    return "program" if is_other_program else "script"


command = LaunchCommand(
    "launch",
    callback=_run_launch,
    params=[
        *make_setting_options(),
        *make_accelerate_options(),
        CONFIG_FILE,
        make_option("--dry_run", None, "Configuration", "Print the command and environment without starting anything."),
        make_option("--force", None, "Configuration", "Let the command line override settings in the script."),
        *make_script_arguments(),
    ],
    help=_ABOUT,
    epilog=_EPILOG,
    aliases={name: now for name, now in EARLIER_NAMES.items() if name not in VALUE_FLAGS},
    context_settings={"allow_interspersed_args": False},
)
