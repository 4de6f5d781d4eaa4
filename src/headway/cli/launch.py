"""`headway launch`: start a script on one process or on many, on one machine or on several."""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import click

from headway.cli.layouts import foreign_options, take_foreign
from headway.cli.options import CONFIG_FILE, GroupedCommand, command_line_layer, examples, option, setting_options
from headway.common import env
from headway.config.layout.mesh import groups_in_words
from headway.config.load import Resolved, Value, environment_layer, resolve
from headway.errors import ConfigError

_ABOUT = """Start SCRIPT with its own ARGS on every accelerator of this machine, or as the flags say.

Flags go before SCRIPT and may be spelt with dashes or underscores; everything after SCRIPT is the script's own. If
SCRIPT takes a flag of the same name, put `--` before SCRIPT. Settings in the script win over flags, flags over HEADWAY_*
variables, variables over the config file. One process is a plain `python SCRIPT`; several are kept by torch's elastic
agent, and the first failure ends them all.
"""

_EPILOG = examples(
    "headway launch train.py --lr 3e-4              every accelerator, or one CPU process",
    "headway launch -n 2 --cpu train.py             two processes on the CPU",
    "headway launch --gpu_ids 0,3 train.py          two of this machine's GPUs",
    "headway launch -n 4 -m my_package.train        a module",
    "headway launch --strategy fsdp train.py        the model sharded over all processes",
    "headway launch -n 8 --strategy fsdp+tp=2 train.py",
    "headway launch -n 8 --dry-run train.py         print the command, start nothing",
    "headway launch -n 16 --num_machines 2 --machine_rank 0 \\",
    "    --main_process_ip 10.0.0.1 --main_process_port 29400 train.py",
)


_RAW = f"{__name__}.raw"
"""Where the command line as typed is kept in click's context."""


class LaunchCommand(GroupedCommand):
    """The command, which also remembers what was typed: flags after the script are answered with the line to type."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Keep the line, and parse it."""
        ctx.meta[_RAW] = list(args)
        return super().parse_args(ctx, args)


def _launch(**given: Any) -> None:
    from headway.cli.misplaced import warning

    ctx = click.get_current_context()
    start(**given, warning=warning(ctx, ctx.meta[_RAW]))


def start(
    script: str,
    script_args: tuple[str, ...],
    config_file: str | None,
    dry_run: bool,
    force: bool,
    warning: str = "",
    **given: Any,
) -> None:
    """Start `script` as the settings say; the process is replaced, or what would be started is printed.

    Args:
        warning: said first, by one of the tasks that a cluster has started.
    """
    # Imported here so that the help does not wait for them.
    from headway.launch import plan, run, target
    from headway.launch.machine import clusters, machine, network
    from headway.launch.plan import Program

    environment = env.snapshot()
    cluster = clusters.detect(environment)
    given, foreign, notes = take_foreign(given)
    detected = cluster.layer if cluster is not None else {}
    with _own_file(config_file, given.get("run_as") is not None, environment) as own_file:
        resolved = settings(given, own_file, force, environment, detected, foreign)
    program = Program(script, script_args, _kind(resolved))
    target.check(program)
    here = machine.look(environment)
    if cluster is None and resolved.get("num_machines", 1) > 1 and not resolved.config.is_set("machine_rank"):
        address = network.name_for_others(here.hostname)
        commands = plan.commands_per_machine(resolved, program, address, network.free_port())
        has_secret = resolved.config.is_set("secret") or bool(environment.get(env.SECRET))
        _name_the_commands(commands, resolved.get("num_machines", 1), has_secret)
    planned = plan.make(resolved, program, here, environment, cluster, notes)
    if warning and planned.banner:
        click.echo(warning, err=True)
    if dry_run:
        click.echo(f"# {planned.banner}")
        if planned.layout is not None:
            for line in groups_in_words(planned.layout):
                click.echo(f"#   {line}")
        for note in planned.notes:
            click.echo(f"# headway: {note}")
        click.echo(planned.shell())
        return
    run.execute(planned, environment, is_quiet=resolved.get("quiet", False))


@contextmanager
def _own_file(named: str | None, is_accelerate: bool, environment: dict[str, str]) -> Iterator[str | None]:
    """The config file; under Accelerate's name, its translation where it is one of Accelerate's."""
    if named is None or not is_accelerate:
        yield named
        return
    from headway.compat.accelerate.launching.commands import with_own_file

    with tempfile.TemporaryDirectory(prefix="headway_") as folder:
        line, more = with_own_file(["--config_file", named], Path(folder))
        environment.update(more)
        yield line[1]


def _name_the_commands(commands: list[str], num_machines: int, has_secret: bool) -> NoReturn:
    """Print the commands, and a secret for all machines unless there is one."""
    import secrets

    click.echo("headway: no cluster starts the other machines, so start each of them by its own command:", err=True)
    if not has_secret:
        click.echo("# on every machine, first: by this they know one another (docs/security.md)")
        click.echo(f"export {env.SECRET}={secrets.token_hex(16)}")
    for rank, text in enumerate(commands):
        click.echo(f"# machine {rank}{' (this one)' if rank == 0 else ''}\n{text}")
    if num_machines > len(commands):
        click.echo(f"# and so on to machine {num_machines - 1}, each with its own --machine_rank")
    click.get_current_context().exit(2)


def settings(
    given: dict[str, Any],
    config_file: str | None,
    force: bool,
    environment: dict[str, str],
    detected: Mapping[str, Value],
    foreign: Mapping[str, Value] | None = None,
) -> Resolved:
    """All layers of a launch, put together.

    Args:
        given: the command line's values by setting, None where a flag was not given.
        config_file: the file that was named; None: the default one, where there is one.
        force: as `--force`.
        environment: the launcher's variables.
        detected: what the cluster says.
        foreign: what flags by Accelerate's words come to.
    """
    from headway.compat.accelerate.launching.launch_flags import explain_file_key
    from headway.config.files import file_layer

    typed = {**command_line_layer(given), **(foreign or {})}
    layers = [typed, environment_layer(environment), file_layer(config_file, environment, explain_file_key), detected]
    return resolve(layers, force=force)


def _kind(resolved: Resolved) -> str:
    if resolved.get("module", False) and resolved.get("no_python", False):
        raise ConfigError(
            "--module runs a Python module and --no_python a program that is not Python; take one of them out"
        )
    return "module" if resolved.get("module", False) else "program" if resolved.get("no_python", False) else "script"


def _parameters() -> list[click.Parameter]:
    return [
        *setting_options(),
        *foreign_options(),
        CONFIG_FILE,
        option("--dry_run", None, "Configuration", "Print the exact command and environment, and start nothing."),
        option("--force", None, "Configuration", "Let the command line win where the script says something else."),
        click.Argument(["script"], metavar="SCRIPT"),
        click.Argument(["script_args"], metavar="[ARGS]...", nargs=-1, type=click.UNPROCESSED),
    ]


command = LaunchCommand(
    "launch",
    callback=_launch,
    params=_parameters(),
    help=_ABOUT,
    epilog=_EPILOG,
    context_settings={"allow_interspersed_args": False},
)
