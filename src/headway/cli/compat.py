"""`headway compat`: list Accelerate's public names, or those that a script uses, and whether Headway provides them."""

import json
from pathlib import Path
from typing import Any

import click

from headway.cli.options import JSON, GroupedCommand, format_examples, make_option
from headway.common.untrusted import escape_text, read_regular_file
from headway.compat.accelerate.served.surface import ServedName, describe_name, list_used_names
from headway.compat.accelerate.served.tables import SURFACE
from headway.errors import ConfigError
from headway.launch.stand_in import FOLDER, VERSION

_ABOUT = f"""Show how Headway serves the names of Accelerate {VERSION} when it stands in for it.

Without SCRIPTS, list all names by module. With SCRIPTS, list the names that these files use. The files are read, not run. The exit
code is 1 if any name is not served.
"""

_EPILOG = format_examples(
    "headway compat train.py                             what the script uses",
    "PYTHONPATH=$(headway compat --path) python train.py   run the script on Headway",
    "headway launch --as accelerate train.py             the same, on every device",
)
_WORDS = {"served": "", "differs": "differs", "not served": "NOT SERVED", "unknown": "unknown"}
_LARGEST = 1 << 26
"""Maximum size of a script in bytes."""
_UNKNOWN = f"not a public name of Accelerate {VERSION}"


def _run_compat(scripts: tuple[Path, ...], path: bool, as_json: bool) -> None:
    if path:
        if scripts or as_json:
            raise ConfigError("--path prints the folder for PYTHONPATH; it takes neither scripts nor --json")
        click.echo(str(FOLDER))
        return
    if not scripts:
        _echo_surface(as_json)
        return
    told: dict[str, list[dict[str, Any]]] = {}
    is_green = True
    for script in scripts:
        rows = _find_names(script)
        is_green = is_green and not any(each.status in ("not served", "unknown") for each, _ in rows)
        told[str(script)] = [_make_row(each) | {"line": line} for each, line in rows]
        if not as_json:  # print each file at once, because many files take a while
            _echo_script(str(script), rows)
    if as_json:
        click.echo(json.dumps(told, indent=1))
    if not is_green:
        click.get_current_context().exit(1)


def _find_names(script: Path) -> list[tuple[ServedName, int]]:
    if script.suffix == ".ipynb":
        raise ConfigError(f"{script} is a notebook; convert it first: jupyter nbconvert --to script {script}")
    source = read_regular_file(script, _LARGEST, ConfigError)  # bytes: `ast` detects the encoding
    try:
        return [(describe_name(use.name), use.line) for use in list_used_names(source)]
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ConfigError(f"{script} cannot be parsed as Python: {error}") from error


def _make_row(each: ServedName) -> dict[str, Any]:
    return {
        "name": each.name,
        "status": each.status,
        "note": each.note or (_UNKNOWN if each.status == "unknown" else ""),
    }


def _echo_script(name: str, rows: list[tuple[ServedName, int]]) -> None:
    if not rows:
        click.echo(escape_text(f"{name}: uses nothing of Accelerate"))
        return
    answers = [each for each, _ in rows]
    click.echo(escape_text(f"{name}: {_count_answers(answers)}"))
    width = max(len(each.name) for each in answers)
    for each, line in rows:
        text = f"  line {line:<5} {each.name:<{width}}  {_WORDS[each.status] or 'served'}"
        note = _make_row(each)["note"]
        click.echo(escape_text(text + (f": {note}" if note else "")))


def _count_answers(answers: list[ServedName]) -> str:
    counts = {status: sum(each.status == status for each in answers) for status in _WORDS}
    parts = [f"{counts['served'] + counts['differs']} served"]
    if counts["differs"]:
        parts[0] += f" ({counts['differs']} with a difference)"
    parts += [f"{counts[status]} {status}" for status in ("not served", "unknown") if counts[status]]
    return f"{len(answers)} names of Accelerate: {', '.join(parts)}"


def _echo_surface(as_json: bool) -> None:
    found = {module: [describe_name(name) for name in names] for module, names in SURFACE.items()}
    if as_json:
        rows = {f"accelerate.{module}": [_make_row(each) for each in answers] for module, answers in found.items()}
        click.echo(json.dumps(rows, indent=1))
        return
    every = [each for answers in found.values() for each in answers]
    click.echo(f"Accelerate {VERSION}: {_count_answers(every)}")
    width = max(len(each.name) for each in every)
    for module, answers in found.items():
        click.echo(f"\naccelerate.{module}")
        for each in answers:
            word = _WORDS[each.status]
            click.echo(f"  {each.name:<{width}}  {word}{': ' if each.note else ''}{each.note}".rstrip())


command = GroupedCommand(
    "compat",
    callback=_run_compat,
    params=[
        click.Argument(["scripts"], nargs=-1, type=click.Path(path_type=Path)),
        make_option("--path", None, "Output", "Only print the folder for PYTHONPATH."),
        JSON,
    ],
    help=_ABOUT,
    epilog=_EPILOG,
)
