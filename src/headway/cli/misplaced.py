"""Launcher flags typed after the script, which go to the script: found, and answered with what to type."""

import ast
import os
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

# What transformers' and Headway's TrainingArguments read from the command line, under names that the launcher has too.
_OF_TRAINING_ARGUMENTS = ("gradient_accumulation_steps", "debug")


@dataclass(frozen=True)
class _Found:
    """A flag of the launcher among the script's arguments.

    Attributes:
        at: its place there.
        words: it and its value, as typed.
        option: which one.
    """

    at: int
    words: tuple[str, ...]
    option: click.Option


def warning(ctx: click.Context, raw: Sequence[str]) -> str:
    """What to say of launch flags after the script; nothing where there is none, or where it is clearly meant.

    It is clearly meant where the launcher got the flag as well, where `--` comes before the script or before the flag,
    where the value cannot be one of the launcher's, and where the script's own text names the flag as one of its.

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
    text = _text(script, bool(ctx.params.get("module"))) if found else ""
    found = [one for one in found if not _takes(text, one)]
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
    options = [one for one in ctx.command.params if isinstance(one, click.Option)]
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
                yield _Found(at, (word,), option)
        elif equals:
            if _fits(option, value):
                yield _Found(at, (word,), option)
        elif at + 1 < len(args) and _fits(option, args[at + 1]):
            yield _Found(at, (word, args[at + 1]), option)


def _plain(flag: str) -> str:
    return f"--{underscored(flag[2:])}" if flag.startswith("--") else flag


def _fits(option: click.Option, value: str) -> bool:
    """Could the launcher take this value?"""
    if option.name not in SETTINGS:
        return not value.startswith("-")
    try:
        from_text(SETTINGS[option.name], value, "")
    except ConfigError:
        return False
    return True


def _text(script: str, is_module: bool) -> str:
    path = Path(*script.split(".")).with_suffix(".py") if is_module else Path(script)
    path = path / "__main__.py" if os.path.isdir(path) else path
    try:
        return path.read_text(errors="replace") if os.path.isfile(path) else ""  # a pipe would be waited for
    except (OSError, ValueError):
        return ""


def _takes(text: str, found: _Found) -> bool:
    """Does the script's own text say that it takes this flag: an argument of a parser's, a dataclass's field, a parameter?"""
    name, flag = str(found.option.name), found.words[0].partition("=")[0]
    typed = flag if flag.startswith("--") else flag[:2]
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return False
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            words = [one.value for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
        elif isinstance(node, ast.Compare) and isinstance(node.left, ast.Constant) and isinstance(node.left.value, str):
            words = [node.left.value]  # "-n" in sys.argv
        elif isinstance(node, ast.AnnAssign | ast.arg):
            if name == (node.arg if isinstance(node, ast.arg) else getattr(node.target, "id", "")):
                return True
            continue
        elif isinstance(node, ast.Name | ast.Attribute) and name in _OF_TRAINING_ARGUMENTS:
            if (node.id if isinstance(node, ast.Name) else node.attr) == "TrainingArguments":
                return True
            continue
        else:
            continue
        if typed in words:
            return True
    return False
