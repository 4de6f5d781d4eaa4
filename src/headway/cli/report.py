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
    "headway report runs/a runs/b --png pictures --axis tokens",
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
        make_option(
            "--axis",
            "step|tokens|samples",
            "Output",
            "Horizontal axis of the PNGs; tokens and samples need their counts in each log.  [default: step]",
            ("step", "tokens", "samples"),
        ),
    ],
    help=_ABOUT,
    epilog=_EPILOG,
)
def command(run: tuple[Path, ...], out: Path | None, png: Path | None, axis: str | None) -> None:
    """Load the runs, then write the HTML page and, if requested, the PNG files, and print the paths.

    Args:
        run: Folders, logs or URLs of runs. Empty: the only run in or below the current folder.
        out: Path of the page. None: `report.html` beside the first run's log, or in the current folder for a URL.
        png: Folder for the PNG files. None: no PNG files.
        axis: Horizontal axis of the PNG files. None: steps.

    Raises:
        ConfigError: If `axis` is given without `png`, or a run has no counts for it. Also if a file cannot be written.
    """
    # Imported here so that `--help` does not wait for this import.
    from headway.core.tracking.report.data import load
    from headway.core.tracking.report.page import html_page
    from headway.core.tracking.report.progress_axes import require_counts
    from headway.errors import ConfigError

    if axis is not None and png is None:
        raise ConfigError(
            f"--axis {axis} chooses the axis of PNG files, but none are written; add --png FOLDER, or leave it out. The page has "
            "buttons for its axis"
        )
    run = run or (Path(),)
    if png is not None:
        from headway.core.tracking.report.drawing import require_matplotlib

        require_matplotlib()
    runs = load(run)
    if axis is not None and axis != "step":
        require_counts(runs, axis)  # raises before the page is written
    default_folder = Path() if isinstance(run[0], ObjectPath) else runs[0].path.parent
    target = out or default_folder / "report.html"
    text = html_page(runs).encode("utf-8", "backslashreplace")
    _write_file(target, text)
    click.echo(f"{target} ({format_bytes(len(text))})")
    if png is not None:
        from headway.core.tracking.report.drawing import draw_charts

        for path in draw_charts(runs, png, axis or "step"):
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
