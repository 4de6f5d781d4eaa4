"""Warning about launcher flags that the user typed after the script."""

import shlex
from collections.abc import Container, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import click
from click.core import ParameterSource

from headway.cli.options import replace_dashes
from headway.core.config.launch import SETTINGS
from headway.core.config.values import parse_text
from headway.errors import ConfigError

_LAUNCHER_ONLY_SETTINGS = {
    setting.name for setting in SETTINGS.values() if setting.group in ("Hardware", "Several machines")
} - {"cpu"}
"""Launcher settings whose flags scripts rarely define themselves. In contrast, many scripts define --cpu."""

_MOVABLE_SETTINGS = SETTINGS.keys() - {"module", "no_python"}
"""Settings whose flags the suggested command line moves before the script.

It moves them only if at least one of the misplaced flags is in `_LAUNCHER_ONLY_SETTINGS`.
"""


def format_misplaced_flags_warning(ctx: click.Context, typed_args: Sequence[str]) -> str:
    """Return a warning if the user typed flags of the launcher after the script's name, else "".

    There is no warning about a flag that the launcher received too, or whose value the launcher does not accept. With
    `--no_python`, short flags are ignored. Arguments after `--`, and all arguments if `--` precedes the script, are
    assumed to be meant for the script.

    Args:
        ctx: Parsed command line of `headway launch`.
        typed_args: Arguments of `headway launch` as the user typed them.
    """
    script, args = str(ctx.params["script"]), list(ctx.params["script_args"])
    launcher_args = list(typed_args[: len(typed_args) - 1 - len(args)])
    if launcher_args[-1:] == ["--"]:
        return ""
    # If the user meant one of them for the launcher, the other flags after the script were probably meant for it, too.
    launcher_only = list(_find_launcher_flags(ctx, args, _LAUNCHER_ONLY_SETTINGS))
    if ctx.params.get("no_python"):
        # Programs have short flags of their own, as in `sh -c`, `python -m` and `echo -n`.
        launcher_only = [flag for flag in launcher_only if flag.words[0].startswith("--")]
    if not launcher_only:
        return ""
    also_misplaced = _find_launcher_flags(ctx, args, _MOVABLE_SETTINGS - _LAUNCHER_ONLY_SETTINGS)
    misplaced = sorted([*launcher_only, *also_misplaced], key=lambda flag: flag.position)
    moved = [word for flag in misplaced for word in flag.words]
    moved_indices = {flag.position + offset for flag in misplaced for offset in range(len(flag.words))}
    remaining = [word for index, word in enumerate(args) if index not in moved_indices]
    flags_text = ", ".join(" ".join(flag.words) for flag in misplaced)
    pronoun = "them" if len(misplaced) > 1 else "it"
    launch_command, script_name = ["headway", "launch", *launcher_args], Path(script).name
    return "\n".join(
        [
            f"headway: warning: {flags_text} after {script_name}: {script_name} gets {pronoun}, and the launcher does not",
            f"  meant for the launcher?  {shlex.join([*launch_command, *moved, script, *remaining])}",
            f"  meant for the script?    {shlex.join([*launch_command, '--', script, *args])}",
        ]
    )


class _MisplacedFlag(NamedTuple):
    """Flag of the launcher among the script's arguments.

    Attributes:
        position: Index of the flag among the arguments.
        words: The flag and, if its value is a separate argument, that value.
    """

    position: int
    words: tuple[str, ...]


def _find_launcher_flags(ctx: click.Context, args: Sequence[str], names: Container[str]) -> Iterator[_MisplacedFlag]:
    """Yield the launcher's flags among the script's arguments, in order.

    Args:
        ctx: Parsed command line of `headway launch`.
        args: Arguments of the script.
        names: Settings whose flags are searched for.
    """
    options = [option for option in ctx.command.params if isinstance(option, click.Option) and option.name in names]
    options_by_flag = {_normalize_flag(word): option for option in options for word in option.opts}
    for index, word in enumerate(args):
        if word == "--":
            return
        if not word.startswith("-") or word == "-":
            continue
        name, attached_value = _split_flag(word)
        option = options_by_flag.get(_normalize_flag(name))
        if option is None or ctx.get_parameter_source(str(option.name)) is ParameterSource.COMMANDLINE:
            continue
        if option.is_flag:
            if attached_value is None:  # a switch takes no value, so `--cpu=1` is not the launcher's
                yield _MisplacedFlag(index, (word,))
        elif attached_value is not None:
            if _is_valid_value(option, attached_value):
                yield _MisplacedFlag(index, (word,))
        elif index + 1 < len(args) and _is_valid_value(option, args[index + 1]):
            yield _MisplacedFlag(index, (word, args[index + 1]))


def _split_flag(word: str) -> tuple[str, str | None]:
    """Return the name of a flag, and the value in the same word, as in `--gpu_ids=0` and `-n2`. None without a value."""
    if word.startswith("--"):
        name, equals, value = word.partition("=")
        return name, value if equals else None
    return word[:2], word[2:] or None


def _normalize_flag(flag: str) -> str:
    return f"--{replace_dashes(flag[2:])}" if flag.startswith("--") else flag


def _is_valid_value(option: click.Option, value: str) -> bool:
    """Whether a value is valid for an option of the launcher."""
    try:
        parse_text(SETTINGS[str(option.name)], value, "")
    except ConfigError:
        return False
    return True
