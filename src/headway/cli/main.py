"""Entry point of the `headway` command: runs a subcommand, and reports an error in one line with an exit code."""

import sys
from collections.abc import Sequence
from importlib import import_module

import click
from click.shell_completion import CompletionItem

from headway.common import env
from headway.common.streams import open_standard_streams
from headway.common.untrusted import escape_json
from headway.errors import ConfigError, HeadwayError
from headway.version import __version__

# Module and help line of each command, so that `headway --help` imports no command.
_COMMANDS = {
    "launch": ("headway.cli.launch", "Start a script on one process or on many."),
    "verify": ("headway.cli.verify", "Check a training script by running its first updates several times."),
    "test": ("headway.cli.self_test:test", "Check the setup: compare a short run with one process."),
    "config": ("headway.cli.config", "Write, show or import the config file of `launch`."),
    "inspect": ("headway.cli.checkpoints:inspect", "Print the contents of a checkpoint."),
    "merge": ("headway.cli.checkpoints:merge", "Write a checkpoint's weights as plain safetensors."),
    "tokenize": ("headway.cli.tokenize", "Turn text into token files for pretraining."),
    "estimate": ("headway.cli.estimate:estimate", "Estimate a model's memory, here or on a GPU, and its speed."),
    "plan": ("headway.cli.plan:plan", "Compare layouts on any number of ranks: memory, traffic, time."),
    "doctor": ("headway.cli.doctor", "Find out why a run does not start, hangs or is slow."),
    "report": ("headway.cli.report", "Plot runs on one HTML page: loss, speed, memory, events."),
    "compat": ("headway.cli.compat", "Show which Accelerate names work, in general or in a script."),
    "env": ("headway.cli.env", "Print versions, hardware and configuration, for bug reports."),
    "completion": ("headway.cli.completion", "Print the completion script for your shell."),
}

_ABOUT = """Run your own PyTorch training loop on any hardware.

`headway COMMAND --help` explains a command.
"""

_EPILOG = """Examples:
  headway launch train.py                          every accelerator, or one CPU process
  headway estimate llama --device h100             what training takes, and the largest batch
  headway report runs/digits                       one page of a run
  source <(headway completion bash)                tab completion of commands and flags
"""


def _replace_dashes(token: str) -> str:
    return token.replace("-", "_")


class LazyGroup(click.Group):
    """Command group that imports a subcommand only when it is run."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the subcommands, in the order of the help."""
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return a subcommand, or None if there is none with this name."""
        entry = _COMMANDS.get(cmd_name)
        if entry is None:
            return None
        module, _, name = entry[0].partition(":")
        command = getattr(import_module(module), name or "command")
        assert isinstance(command, click.Command)
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return completions for subcommands and options. No subcommand is imported."""
        completions = [
            CompletionItem(name, help=text) for name, (_, text) in _COMMANDS.items() if name.startswith(incomplete)
        ]
        return completions + click.Command.shell_complete(self, ctx, incomplete)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of subcommands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in _COMMANDS.items()])

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the example commands at the end of the help page without wrapping their lines."""
        formatter.write(f"\n{_EPILOG}")

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the name, the subcommand and the remaining arguments of a command line.

        Name and subcommand are None only if click parses the line tolerantly, as it does for shell completion.

        Raises:
            ConfigError: If there is no subcommand of this name. The message suggests a similar one, or lists all.
        """
        if not args[0].startswith("-") and _replace_dashes(args[0]) not in _COMMANDS:
            from headway.core.config.values import suggest_word

            hint = suggest_word(args[0], list(_COMMANDS))
            raise ConfigError(f"{args[0]!r} is not a command of headway{hint or '; there are ' + ', '.join(_COMMANDS)}")
        return super().resolve_command(ctx, args)


group = LazyGroup(
    "headway",
    help=_ABOUT,
    context_settings={
        "token_normalize_func": _replace_dashes,
        "help_option_names": ["-h", "--help"],
        "max_content_width": 100,
    },
)
click.version_option(__version__, message="headway %(version)s", help="Print the version.")(group)


def main(args: Sequence[str] | None = None) -> None:
    """Run a `headway` command line and exit the process.

    The exit code is 0 on success, 2 for a `ConfigError` or a wrong command line, and 1 for any other `HeadwayError`. A
    subcommand can exit with another code. Other exceptions are not caught.

    Args:
        args: Command-line arguments. None: those of this process.
    """
    open_standard_streams()
    try:
        if env.get("HEADWAY_LOG_LEVEL"):
            # Report an invalid level in one line. Otherwise the first process that reads it would print a traceback.
            import_module("headway.log").read_level()
        group.main(args=None if args is None else list(args), prog_name="headway")
    except HeadwayError as error:
        text = escape_json(str(error))  # the message may contain names from untrusted files
        click.echo(f"headway: error: {text}", err=True)
        sys.exit(2 if isinstance(error, ConfigError) else 1)


if __name__ == "__main__":
    main()
