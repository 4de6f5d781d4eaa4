"""Launcher flags typed after the script, which go to the script: found, and answered with what to type."""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
from click.core import ParameterSource

from headway.cli.options import underscored
from headway.config.launch import SETTINGS
from headway.config.values import from_text
from headway.errors import ConfigError

# Of the others, such as --mixed_precision or --cpu, many scripts have their own.
_ONLY_OF_LAUNCHERS = {one.name for one in SETTINGS.values() if one.group in ("Hardware", "Several machines")} - {"cpu"}


@dataclass(frozen=True)
class _Found:
    """A flag of the launcher among the script's arguments.

    Attributes:
        at: its place there.
        words: it and its value, as typed.
    """

    at: int
    words: tuple[str, ...]


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
    found = list(_search(ctx, args))
    if ctx.params.get("no_python"):
        found = [one for one in found if one.words[0].startswith("--")]  # sh -c, python -m, echo -n
    if not found:
        return ""
    moved = [word for one in found for word in one.words]
    places = {place for one in found for place in range(one.at, one.at + len(one.words))}
    rest = [word for place, word in enumerate(args) if place not in places]
    which = ", ".join(" ".join(one.words) for one in found)
    they = "them" if len(found) > 1 else "it"
    begin, name = ["headway", "launch", *flags], Path(script).name
    return "\n".join(
        [
            f"headway: warning: {which} after {name}: {name} gets {they}, and the launcher does not",
            f"  meant for the launcher?  {shlex.join([*begin, *moved, script, *rest])}",
            f"  meant for the script?    {shlex.join([*begin, '--', script, *args])}",
        ]
    )


def _search(ctx: click.Context, args: Sequence[str]) -> Iterator[_Found]:
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
        if option.is_flag:
            if not equals:
                yield _Found(at, (word,))
        elif equals:
            if _fits(option, value):
                yield _Found(at, (word,))
        elif at + 1 < len(args) and _fits(option, args[at + 1]):
            yield _Found(at, (word, args[at + 1]))


def _plain(flag: str) -> str:
    return f"--{underscored(flag[2:])}" if flag.startswith("--") else flag


def _fits(option: click.Option, value: str) -> bool:
    """Could the launcher take this value?"""
    try:
        from_text(SETTINGS[str(option.name)], value, "")
    except ConfigError:
        return False
    return True
