"""`headway report`: write one HTML page, and optionally PNG files, about one or more runs."""

from pathlib import Path

import click

from headway.cli.options import PLACE, GroupedCommand, LocalPath, format_examples, make_option
from headway.common.object_path import ObjectPath
from headway.common.text import format_bytes

_ABOUT = """Plot one or more runs on one page. RUN is a folder, its `log.jsonl`, or a URL such as s3://bucket/run.

The page is a single HTML file that needs no network. It shows loss, learning rate, gradient norm, speed and memory, and marks
out-of-memory errors, restarts and checkpoints. The curves of several runs share the charts, and their settings are compared. Without
RUN, the page shows the only run in or below the current folder; if there are several, an error lists them.
"""

_EPILOG = format_examples(
    "headway report runs/digits                       writes runs/digits/report.html",
    "headway report runs/a runs/b --out compare.html  two runs on one page",
    "headway report runs/digits --png pictures        and each chart as a PNG",
)


_FILE = LocalPath(path_type=Path, dir_okay=False)
_FOLDER = LocalPath(path_type=Path, file_okay=False)


@click.command(
    "report",
    cls=GroupedCommand,
    params=[
        click.Argument(["run"], type=PLACE, nargs=-1),
        make_option(
            "--out",
            "FILE",
            "Output",
            "File of the page.  [default: report.html next to the first run's log, or in the current folder for a URL]",
            _FILE,
        ),
        make_option("--png", "FOLDER", "Output", "Write each chart as a PNG, too; needs headway[plots].", _FOLDER),
    ],
    help=_ABOUT,
    epilog=_EPILOG,
)
def command(run: tuple[Path, ...], out: Path | None, png: Path | None) -> None:
    """Load the runs, then write the HTML page and, if requested, the PNG files, and print the paths.

    Args:
        run: Folders, logs or URLs of runs. Empty: the only run in or below the current folder.
        out: Path of the page. None: `report.html` beside the first run's log, or in the current folder for a URL.
        png: Folder for the PNG files. None: no PNG files.
    """
    # Imported here so that `--help` does not wait for this import.
    from headway.core.tracking.report.data import load
    from headway.core.tracking.report.page import html_page

    run = run or (Path(),)
    if png is not None:
        from headway.core.tracking.report.drawing import require_matplotlib

        require_matplotlib()
    runs = load(run)
    default_folder = Path() if isinstance(run[0], ObjectPath) else runs[0].path.parent
    target = out or default_folder / "report.html"
    text = html_page(runs).encode("utf-8", "backslashreplace")
    _write_file(target, text)
    click.echo(f"{target} ({format_bytes(len(text))})")
    if png is not None:
        from headway.core.tracking.report.drawing import draw_charts

        for path in draw_charts(runs, png):
            click.echo(str(path))


def _write_file(target: Path, text: bytes) -> None:
    """Write the page, and create its folder if necessary. Raise `ConfigError` if that fails."""
    from headway.errors import ConfigError

    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(text)
    except OSError as error:
        raise ConfigError(
            f"cannot write the page to {target} ({error.strerror}); name another file with --out"
        ) from error
