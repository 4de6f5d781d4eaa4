"""`headway launch`: start a script on one process or on many, on one machine or on several; `headway test`: start the self-check.

Launcher flags typed after the script, which go to the script: found, and answered with what to type.

Accelerate's launch flags for layouts: accepted but not shown in the help, and each one translated, ignored or refused.
"""

import shlex
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from headway.cli.options import (
    CONFIG_FILE,
    GroupedCommand,
    GroupedOption,
    command_line_layer,
    examples,
    option,
    setting_options,
    underscored,
)
from headway.common import env
from headway.compat.accelerate.launching import layout_words
from headway.config.launch import EARLIER_NAMES, SETTINGS
from headway.config.load import COMMAND_LINE, Resolved, Value, environment_layer, resolve
from headway.config.mesh import ENGINES, groups_in_words
from headway.config.parallelism import LayoutRequest
from headway.config.values import from_text
from headway.errors import ConfigError

# Of the others, such as --mixed_precision or --cpu, many scripts have their own.
_ONLY_OF_LAUNCHERS = {one.name for one in SETTINGS.values() if one.group in ("Hardware", "Several machines")} - {"cpu"}


def warning(ctx: click.Context, raw: Sequence[str]) -> str:
    """What to say of launch flags after the script; nothing where there is none, or where it is clearly meant.

    It is clearly meant where the launcher got the flag as well, where `--` comes before the script or before the flag, and
    where the value cannot be one of the launcher's.

    Args:
        ctx: the parsed command line of `headway launch`.
        raw: the same, as typed.
    """
    script, args = str(ctx.params["script"]), list(ctx.params["script_args"])
    flags = list(raw[: len(raw) - 1 - len(args)])
    if flags[-1:] == ["--"]:
        return ""
    found = dict(_search(ctx, args))
    if ctx.params.get("no_python"):
        found = {at: words for at, words in found.items() if words[0].startswith("--")}  # sh -c, python -m, echo -n
    if not found:
        return ""
    moved = [word for words in found.values() for word in words]
    places = {place for at, words in found.items() for place in range(at, at + len(words))}
    rest = [word for place, word in enumerate(args) if place not in places]
    which = ", ".join(map(" ".join, found.values()))
    they = "them" if len(found) > 1 else "it"
    begin, name = ["headway", "launch", *flags], Path(script).name
    return "\n".join(
        [
            f"headway: warning: {which} after {name}: {name} gets {they}, and the launcher does not",
            f"  meant for the launcher?  {shlex.join([*begin, *moved, script, *rest])}",
            f"  meant for the script?    {shlex.join([*begin, '--', script, *args])}",
        ]
    )


def _search(ctx: click.Context, args: Sequence[str]) -> Iterator[tuple[int, tuple[str, ...]]]:
    """The launcher's flags among the script's arguments: the place of each, and it with its value, as typed."""
    options = [one for one in ctx.command.params if isinstance(one, click.Option) and one.name in _ONLY_OF_LAUNCHERS]
    known = {_plain(word): one for one in options for word in one.opts}
    for at, word in enumerate(args):
        if word == "--":
            return
        if not word.startswith("-") or word == "-":
            continue
        is_long = word.startswith("--")
        name, equals, value = word.partition("=") if is_long else (word[:2], word[2:], word[2:])
        option = known.get(_plain(name))
        if option is None or ctx.get_parameter_source(str(option.name)) is ParameterSource.COMMANDLINE:
            continue
        if option.is_flag or equals:
            if not equals if option.is_flag else _fits(option, value):
                yield at, (word,)
        elif at + 1 < len(args) and _fits(option, args[at + 1]):
            yield at, (word, args[at + 1])


def _plain(flag: str) -> str:
    return f"--{underscored(flag[2:])}" if flag.startswith("--") else flag


def _fits(option: click.Option, value: str) -> bool:
    """Could the launcher take this value?"""
    try:
        from_text(SETTINGS[str(option.name)], value, "")
    except ConfigError:
        return False
    return True


_SWITCHES = ("use_fsdp", "use_parallelism_config", "use_deepspeed")
_ONLY_OF_PLUGINS = (
    "limit_all_gathers param_init_fn state_dict_config optim_state_dict_config mixed_precision_policy".split()  # noqa: SIM905
)
_VALUES = (
    *(f"fsdp_{key}" for key in layout_words.FSDP_KEYS if key not in _ONLY_OF_PLUGINS),
    *(f"parallelism_config_{key}" for key in layout_words.SIZE_KEYS),
    *layout_words.DEEPSPEED_KEYS,
)


def foreign_options() -> list[click.Parameter]:
    """The flags that Headway's own settings do not have."""
    return [
        *(GroupedOption([f"--{name}"], is_flag=True, default=None, hidden=True) for name in _SWITCHES),
        *(GroupedOption([f"--{name}"], hidden=True) for name in _VALUES if name not in SETTINGS),
    ]


def take_foreign(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Value], tuple[str, ...]]:
    """Read the flags for layouts by Accelerate's words.

    Args:
        given: click's parsed values, None where a flag was not given.

    Returns:
        The other flags, what these decide, and a note on those that change nothing.

    Raises:
        ConfigError: a flag that is refused, a value that cannot be, or two flags that contradict each other.
    """
    mine = {name: value for name, value in given.items() if name in _SWITCHES or name in _VALUES}
    rest = {name: value for name, value in given.items() if name not in mine}
    read = LayoutRequest()
    for name, value in mine.items():
        if value is None:
            continue
        if name == "use_fsdp":
            read.use_shards("--use_fsdp")
        elif name == "use_deepspeed":
            read.use_deepspeed("--use_deepspeed")
        elif name in layout_words.DEEPSPEED_KEYS:
            layout_words.read_deepspeed(read, name, value, f"--{name}")
        elif name.startswith("fsdp_"):
            layout_words.read_fsdp(read, name.removeprefix("fsdp_"), value, f"--{name}")
        elif name != "use_parallelism_config":
            layout_words.read_size(read, name.removeprefix("parallelism_config_"), value, f"--{name}")
    for key, reason in read.refused.items():
        raise ConfigError(f"{key}: {reason}")
    layer = {name: Value(value, f"{COMMAND_LINE}: {key}") for name, (value, key) in read.settings.items()}
    asked = read.strategy()
    if asked is not None:
        _check_one(rest.get("strategy"), asked)
        if rest.get("strategy") is None:
            layer["strategy"] = Value(asked[0], f"{COMMAND_LINE}: {asked[1]}")
    return rest, layer, ((f"without effect: {'; '.join(read.ignored)}",) if read.ignored else ())


def _check_one(typed: str | None, asked: tuple[str, str]) -> None:
    """`--use_fsdp --strategy fsdp+tp=2` is one wish; `--use_fsdp --strategy ddp` is two."""
    text, keys = asked
    if typed is None or text == typed:
        return
    by_deepspeed = text == "deepspeed" and typed.lower() in ENGINES
    by_shards = text == "fsdp" and ("fsdp" in typed.lower() or "hsdp" in typed.lower())
    if not by_deepspeed and not by_shards:
        raise ConfigError(f"--strategy {typed} contradicts {text} from {keys}; remove one of them")


_ABOUT = """Start SCRIPT with its own ARGS on every accelerator of this machine, or as the flags say.

Flags go before SCRIPT and may be spelt with dashes or underscores; everything after SCRIPT is the script's own. If
SCRIPT takes a flag of the same name, put `--` before SCRIPT. Settings in the script win over flags, flags over HEADWAY_*
variables, variables over the config file. One process is a plain `python SCRIPT`; several are supervised by torch's elastic
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
    from headway.launch import clusters, machine, plan, run
    from headway.launch.plan import Program
    from headway.runtime import network

    environment = env.snapshot()
    cluster = clusters.detect(environment)
    given, foreign, notes = take_foreign(given)
    detected = cluster.layer if cluster is not None else {}
    with _own_file(config_file, given.get("run_as") is not None, environment) as own_file:
        resolved = settings(given, own_file, force, environment, detected, foreign)
    program = Program(script, script_args, _kind(resolved))
    run.check(program)
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
    from headway.compat.accelerate.launching.config_file import explain_file_key
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


command = LaunchCommand(
    "launch",
    callback=_launch,
    params=[
        *setting_options(),
        *foreign_options(),
        CONFIG_FILE,
        option("--dry_run", None, "Configuration", "Print the exact command and environment, and start nothing."),
        option("--force", None, "Configuration", "Let the command line override what the script says."),
        click.Argument(["script"], metavar="SCRIPT", type=click.Path()),
        click.Argument(
            ["script_args"],
            metavar="[ARGS]...",
            nargs=-1,
            type=click.UNPROCESSED,
            shell_complete=lambda ctx, param, typed: [CompletionItem(typed, type="file")],
        ),
    ],
    help=_ABOUT,
    epilog=_EPILOG,
    aliases={name: now for name, now in EARLIER_NAMES.items() if name not in _VALUES},
    context_settings={"allow_interspersed_args": False},
)


_ABOUT_TEST = """Check this set-up: start Headway's self-check as `headway launch` would start a script with the same flags.

It compares data order, gradients, collectives, RNG states and metrics of the real run with what one process computes,
says what it checked and how long it took, and exits 0 only if all is right.
"""

_EPILOG_TEST = examples(
    "headway test                            as `headway launch` would run here",
    "headway test -n 2 --cpu                 two processes on the CPU",
    "headway test --strategy fsdp            a sharded layout",
    "headway test --config_file my.yaml      the settings of a file",
)


def _test(config_file: str | None, dry_run: bool, **given: Any) -> None:
    start("headway.cli.checks", ("test",), config_file, dry_run, False, **{**given, "module": True, "no_python": None})


_TEST_PARAMS = [
    *(each for each in setting_options() if each.name not in ("module", "no_python")),
    CONFIG_FILE,
    option("--dry_run", None, "Configuration", "Print the command, and start nothing."),
]
test = GroupedCommand("test", callback=_test, params=_TEST_PARAMS, help=_ABOUT_TEST, epilog=_EPILOG_TEST)
