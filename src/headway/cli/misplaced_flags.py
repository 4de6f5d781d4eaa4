"""Warning about launcher flags that the user typed after the script."""

import shlex
from collections.abc import Container, Iterator, Sequence
from pathlib import Path

import click
from click.core import ParameterSource

from headway.cli.options import replace_dashes
from headway.core.config.launch import SETTINGS
from headway.core.config.values import parse_text
from headway.errors import ConfigError

_ONLY_OF_LAUNCHERS = {
    setting.name for setting in SETTINGS.values() if setting.group in ("Hardware", "Several machines")
} - {"cpu"}
"""Launcher settings whose flags scripts rarely define themselves. In contrast, many scripts define --cpu."""

_MOVABLE = SETTINGS.keys() - {"module", "no_python"}
"""Settings whose flags the suggested command line moves before the script.

It moves them only if at least one of the misplaced flags is in `_ONLY_OF_LAUNCHERS`.
"""


def find_misplaced_flags(ctx: click.Context, raw: Sequence[str]) -> str:
    """Return a warning if the user typed flags of the launcher after the script's name, else "".

    There is no warning about a flag that the launcher received too, or whose value the launcher does not accept. With
    `--no_python`, short flags are ignored.
    Arguments after `--`, and all arguments if `--` precedes the script, are assumed to be meant for the script.

    Args:
        ctx: Parsed command line of `headway launch`.
        raw: Arguments of `headway launch` as the user typed them.
    """
    script, args = str(ctx.params["script"]), list(ctx.params["script_args"])
    flags = list(raw[: len(raw) - 1 - len(args)])
    if flags[-1:] == ["--"]:
        return ""
    found = dict(_find_flags(ctx, args, _ONLY_OF_LAUNCHERS))
    if ctx.params.get("no_python"):
        # Programs have short flags of their own, as in `sh -c`, `python -m` and `echo -n`.
        found = {at: words for at, words in found.items() if words[0].startswith("--")}
    if not found:
        return ""
    found = dict(sorted((found | dict(_find_flags(ctx, args, _MOVABLE - _ONLY_OF_LAUNCHERS))).items()))
    moved = [word for words in found.values() for word in words]
    places = {place for at, words in found.items() for place in range(at, at + len(words))}
    remaining = [word for place, word in enumerate(args) if place not in places]
    which = ", ".join(map(" ".join, found.values()))
    they = "them" if len(found) > 1 else "it"
    begin, name = ["headway", "launch", *flags], Path(script).name
    return "\n".join(
        [
            f"headway: warning: {which} after {name}: {name} gets {they}, and the launcher does not",
            f"  meant for the launcher?  {shlex.join([*begin, *moved, script, *remaining])}",
            f"  meant for the script?    {shlex.join([*begin, '--', script, *args])}",
        ]
    )


def _find_flags(
    ctx: click.Context, args: Sequence[str], names: Container[str]
) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Yield pairs of (index, words) for the launcher's flags among the script's arguments.

    The words are the flag and, if the flag's value is a separate argument, that value.

    Args:
        ctx: Parsed command line of `headway launch`.
        args: Arguments of the script.
        names: Settings whose flags are searched for.
    """
    options = [option for option in ctx.command.params if isinstance(option, click.Option) and option.name in names]
    known = {_normalize_flag(word): option for option in options for word in option.opts}
    for at, word in enumerate(args):
        if word == "--":
            return
        if not word.startswith("-") or word == "-":
            continue
        is_long = word.startswith("--")
        name, equals, value = word.partition("=") if is_long else (word[:2], word[2:], word[2:])
        option = known.get(_normalize_flag(name))
        if option is None or ctx.get_parameter_source(str(option.name)) is ParameterSource.COMMANDLINE:
            continue
        if option.is_flag or equals:
            if not equals if option.is_flag else _is_valid_value(option, value):
                yield at, (word,)
        elif at + 1 < len(args) and _is_valid_value(option, args[at + 1]):
            yield at, (word, args[at + 1])


def _normalize_flag(flag: str) -> str:
    return f"--{replace_dashes(flag[2:])}" if flag.startswith("--") else flag


def _is_valid_value(option: click.Option, value: str) -> bool:
    """Whether a value is valid for an option of the launcher."""
    try:
        parse_text(SETTINGS[str(option.name)], value, "")
    except ConfigError:
        return False
    return True
