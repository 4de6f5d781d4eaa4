"""`headway completion`: print the script for shell completion of commands, flags and values."""

import click
from click.shell_completion import get_completion_class

from headway.cli.options import GroupedCommand, format_examples

_ABOUT = "Print the script for tab completion of headway's commands and flags in SHELL."

_EPILOG = format_examples(
    "source <(headway completion bash)                                   in ~/.bashrc",
    "source <(headway completion zsh)                                    in ~/.zshrc",
    "headway completion fish > ~/.config/fish/completions/headway.fish   once",
)


def _print_completion(shell: str) -> None:
    """Print the script that enables completion in a shell."""
    script = get_completion_class(shell)
    assert script is not None  # click knows all shells that the argument accepts
    group = click.get_current_context().find_root().command
    click.echo(script(group, {}, "headway", "_HEADWAY_COMPLETE").source())


command = GroupedCommand(
    "completion",
    callback=_print_completion,
    params=[click.Argument(["shell"], metavar="bash|zsh|fish", type=click.Choice(("bash", "zsh", "fish")))],
    help=_ABOUT,
    epilog=_EPILOG,
)
