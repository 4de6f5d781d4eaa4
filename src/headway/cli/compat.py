"""`headway compat`: list Accelerate's public names, or those that a script uses, and whether Headway provides them."""

import json
from pathlib import Path
from typing import Any

import click

from headway.cli.options import JSON, GroupedCommand, format_examples, make_option
from headway.common.untrusted import escape_text, read_regular_file
from headway.compat.accelerate.provided_names.surface import NameReport, describe_name, list_used_names
from headway.compat.accelerate.provided_names.tables import SURFACE
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
_STATUS_WORDS = {"served": "", "differs": "differs", "not served": "NOT SERVED", "unknown": "unknown"}
_MAX_SCRIPT_BYTES = 1 << 26
"""Maximum size of a script in bytes."""
_UNKNOWN_NOTE = f"not a public name of Accelerate {VERSION}"


def _run_compat(scripts: tuple[Path, ...], path: bool, as_json: bool) -> None:
    """Print the report on the scripts or on all names, or the folder for PYTHONPATH.

    Exit with code 1 if a script uses a name that is not served, or that is not a public name of Accelerate.

    Args:
        scripts: Scripts to check. Empty: report on all names of Accelerate.
        path: Whether to print only the folder that PYTHONPATH needs for `import accelerate`.
        as_json: Whether to print JSON.

    Raises:
        ConfigError: If `path` is combined with scripts or with `as_json`, or if a script is a notebook or cannot be
            read or parsed.
    """
    if path:
        if scripts or as_json:
            raise ConfigError("--path prints the folder for PYTHONPATH; it takes neither scripts nor --json")
        click.echo(str(FOLDER))
        return
    if not scripts:
        _echo_surface(as_json)
        return
    rows_by_script: dict[str, list[dict[str, Any]]] = {}
    is_all_served = True
    for script in scripts:
        rows = _find_names(script)
        is_all_served = is_all_served and not any(each.status in ("not served", "unknown") for each, _ in rows)
        rows_by_script[str(script)] = [_make_row(each) | {"line": line} for each, line in rows]
        if not as_json:  # print each file at once, because many files take a while
            _echo_script(str(script), rows)
    if as_json:
        click.echo(json.dumps(rows_by_script, indent=1))
    if not is_all_served:
        click.get_current_context().exit(1)


def _find_names(script: Path) -> list[tuple[NameReport, int]]:
    """Return the names of Accelerate that a script uses, each with the line of its first use.

    Raises:
        ConfigError: If the script is a notebook, is not a regular file, is too large, or cannot be parsed.
    """
    if script.suffix == ".ipynb":
        raise ConfigError(f"{script} is a notebook; convert it first: jupyter nbconvert --to script {script}")
    source = read_regular_file(script, _MAX_SCRIPT_BYTES, ConfigError)  # bytes: `ast` detects the encoding
    try:
        return [(describe_name(use.name), use.line) for use in list_used_names(source)]
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ConfigError(f"{script} cannot be parsed as Python: {error}") from error


def _make_row(report: NameReport) -> dict[str, Any]:
    """Return a name's report as a row of the JSON output."""
    return {
        "name": report.name,
        "status": report.status,
        "note": report.note or (_UNKNOWN_NOTE if report.status == "unknown" else ""),
    }


def _echo_script(name: str, rows: list[tuple[NameReport, int]]) -> None:
    """Print the names of Accelerate that one script uses, with their lines, as text."""
    if not rows:
        click.echo(escape_text(f"{name}: uses nothing of Accelerate"))
        return
    names = [each for each, _ in rows]
    click.echo(escape_text(f"{name}: {_format_counts(names)}"))
    width = max(len(each.name) for each in names)
    for each, line in rows:
        text = f"  line {line:<5} {each.name:<{width}}  {_STATUS_WORDS[each.status] or 'served'}"
        note = _make_row(each)["note"]
        click.echo(escape_text(text + (f": {note}" if note else "")))


def _format_counts(names: list[NameReport]) -> str:
    """Return a line that counts the names of Accelerate by status."""
    counts = {status: sum(each.status == status for each in names) for status in _STATUS_WORDS}
    parts = [f"{counts['served'] + counts['differs']} served"]
    if counts["differs"]:
        parts[0] += f" ({counts['differs']} with a difference)"
    parts += [f"{counts[status]} {status}" for status in ("not served", "unknown") if counts[status]]
    return f"{len(names)} names of Accelerate: {', '.join(parts)}"


def _echo_surface(as_json: bool) -> None:
    """Print every public name of Accelerate and how Headway serves it, by module, as text or JSON."""
    names_by_module = {module: [describe_name(name) for name in names] for module, names in SURFACE.items()}
    if as_json:
        rows = {
            f"accelerate.{module}": [_make_row(report) for report in names] for module, names in names_by_module.items()
        }
        click.echo(json.dumps(rows, indent=1))
        return
    all_names = [report for names in names_by_module.values() for report in names]
    click.echo(f"Accelerate {VERSION}: {_format_counts(all_names)}")
    width = max(len(report.name) for report in all_names)
    for module, names in names_by_module.items():
        click.echo(f"\naccelerate.{module}")
        for report in names:
            word = _STATUS_WORDS[report.status]
            click.echo(f"  {report.name:<{width}}  {word}{': ' if report.note else ''}{report.note}".rstrip())


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
