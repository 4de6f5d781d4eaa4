"""Outputs of a progress bar: a terminal, a notebook cell, or lines of plain text."""

import os
import sys
from html import escape
from typing import Any, Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column

from headway.common import env, scope

_STYLE = "font-family: var(--jp-code-font-family, monospace); font-size: 13px; white-space: pre-wrap; margin: 2px 0"
"""CSS of a progress line in a notebook."""
_BAR_WIDTH = 24
"""Width of a bar in a terminal, in columns."""
SEPARATOR = " | "
"""Text between the parts of a progress line."""


class ShownBar(Protocol):
    """Interface through which an output reads the state of a progress bar.

    Attributes:
        description: Text in front of the bar.
        total: Total number of items, or None if unknown.
        num_done: Number of items done.
    """

    description: str
    total: int | None

    @property
    def num_done(self) -> int: ...

    def facts(self, width: int | None = None) -> str:
        """Return the text next to the bar, such as counts and rates.

        Args:
            width: Available columns. The least important parts are left out until the text fits. The most important
                ones are always shown, even if they do not fit. Default: None, for no limit.
        """


def is_in_notebook() -> bool:
    """Whether this code runs in a Jupyter kernel, whose outputs can be redrawn. False for IPython in a terminal."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    kernel = None if shell is None else getattr(shell, "kernel", None)
    if kernel is None:
        return False
    # A forked child inherits the kernel's objects, but no front end receives its output.
    kernel_pid = getattr(getattr(kernel, "session", None), "pid", os.getpid())
    return bool(kernel_pid == os.getpid())


class _CellArea:
    """Redrawable area in the output of the current notebook cell. Front ends without HTML show text."""

    def __init__(self) -> None:
        self._handle: Any = None  # IPython's display handle; None before the first output

    def _redraw_output(self, html: str, text: str) -> None:
        """Display the bars in the notebook's cell, or replace those that are displayed.

        Args:
            html: Bars as HTML.
            text: Bars as plain text, for notebooks that show no HTML.
        """
        from IPython.display import display

        data = {"text/html": html, "text/plain": text}
        if self._handle is None:
            self._handle = display(data, raw=True, display_id=True)  # type: ignore[no-untyped-call]
        else:
            self._handle.update(data, raw=True)


class NotebookBar(_CellArea):
    """Progress bar in a notebook cell. The bars of inner loops are shown below it while these loops run."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: dict[int, tuple[str, str]] = {}  # HTML and text of each bar, by the bar's id

    def show(self, bar: ShownBar) -> None:
        """Draw the current state of a bar. A bar that is shown already keeps its position."""
        facts, progress = bar.facts(), ""
        if bar.total:
            style = "width: 200px; vertical-align: middle"
            progress = f'<progress value="{bar.num_done}" max="{bar.total}" style="{style}"></progress>'
        description = f"{escape(bar.description)} " if bar.description else ""
        html = f'<div style="{_STYLE}">{description}{progress} {escape(facts)}</div>'
        self._lines[id(bar)] = html, f"{bar.description}: {facts}" if bar.description else facts
        self._redraw_lines()

    def remove(self, bar: ShownBar) -> None:
        """Remove a bar from the output."""
        if self._lines.pop(id(bar), None) is not None:
            self._redraw_lines()

    def _redraw_lines(self) -> None:
        """Display the lines of all bars."""
        lines = self._lines.values()
        self._redraw_output("".join(line for line, _ in lines), "\n".join(text for _, text in lines))


class NotebookTable(_CellArea):
    """Table in the output of a notebook cell, which is redrawn when its rows change."""

    def show(self, rows: list[dict[str, str]]) -> None:
        """Draw the rows. The columns are the keys of all rows, in order of first appearance.

        Args:
            rows: For each row, its texts by column name. A missing column is left empty.
        """
        columns = list(dict.fromkeys(name for row in rows for name in row))
        cells = ["".join(f"<td>{escape(row.get(name, ''))}</td>" for name in columns) for row in rows]
        head = "".join(f"<th>{escape(name)}</th>" for name in columns)
        body = "".join(f"<tr>{each}</tr>" for each in cells)
        self._redraw_output(
            f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>",
            "\n".join(", ".join(f"{name} {value}" for name, value in row.items()) for row in rows),
        )


class _SharedDisplay(list[Progress]):
    """Holder of the Rich progress display that all bars in this process's terminal share; empty if no bar is shown.

    Bars of inner loops are shown below the outer bar.
    """


class _SharedNotebookBar(list[NotebookBar]):
    """Holder of the notebook bar that all loops in this process's notebook share; empty if no bar is shown.

    Bars of inner loops are shown below the outer bar.
    """


class LinesOutput:
    """Progress output for files and pipes. It prints one line of text per interval.

    Args:
        file: File to print to.
        interval: Seconds between two lines.
    """

    def __init__(self, file: TextIO, interval: float) -> None:
        self.interval = interval
        self._file = file
        self._num_printed = -1  # number of done items in the last line

    def draw(self, bar: ShownBar) -> None:
        """Print the state of a bar as one line."""
        self._num_printed = bar.num_done
        description = f"{bar.description}: " if bar.description else ""
        print(f"{description}{bar.facts()}", file=self._file, flush=True)

    def close(self, bar: ShownBar) -> None:
        """Print the bar's final state as one line, unless it has been printed."""
        if self._num_printed != bar.num_done:
            self.draw(bar)


class TerminalOutput:
    """Live progress bar in a terminal. Bars of inner loops are shown below the outer bar."""

    interval = 0.2

    def __init__(self, bar: ShownBar, console: Console) -> None:
        self._facts_width = console.width - len(bar.description) - _BAR_WIDTH - 3
        self._display = scope.get_or_create(_SharedDisplay)
        self._is_outermost = not self._display
        if self._is_outermost:
            self._display.append(_make_rich_progress(console))
            self._display[0].start()
        self._task = self._display[0].add_task(bar.description, total=bar.total, facts="")

    def draw(self, bar: ShownBar) -> None:
        """Redraw a bar with its current state."""
        self._display[0].update(self._task, completed=bar.num_done, facts=bar.facts(self._facts_width))

    def close(self, bar: ShownBar) -> None:
        """Draw the final state of a bar.

        The bar of the outermost loop stays visible, and that of an inner loop is removed.
        """
        self.draw(bar)
        if self._is_outermost:
            self._display.pop().stop()
        else:
            self._display[0].remove_task(self._task)


class CellOutput:
    """Live progress bar in the output of a notebook cell. Bars of inner loops are shown below the outer bar."""

    interval = 0.2

    def __init__(self) -> None:
        self._shared_bar = scope.get_or_create(_SharedNotebookBar)
        self._is_outermost = not self._shared_bar
        if self._is_outermost:
            self._shared_bar.append(NotebookBar())

    def draw(self, bar: ShownBar) -> None:
        """Redraw a bar with its current state."""
        self._shared_bar[0].show(bar)

    def close(self, bar: ShownBar) -> None:
        """Draw the final state of the outermost loop's bar, which stays visible.

        The bar of an inner loop is removed.
        """
        if self._is_outermost:
            self.draw(bar)
            self._shared_bar.pop()
        else:
            self._shared_bar[0].remove(bar)


def _make_rich_progress(console: Console) -> Progress:
    """Return the display of bars in a terminal."""
    facts_column = Column(no_wrap=True, overflow="ellipsis")
    return Progress(
        TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True)),
        BarColumn(bar_width=_BAR_WIDTH),
        TextColumn("{task.fields[facts]}", style="dim", markup=False, table_column=facts_column),
        console=console,
        refresh_per_second=4,
        # Print the loop's output above the bar, unless standard output is redirected to a file.
        redirect_stdout=sys.stdout is not None and sys.stdout.isatty(),
        redirect_stderr=sys.stderr is not None and sys.stderr.isatty(),
    )


def is_live_possible(console: Console, file: TextIO) -> bool:
    """Whether the file is a terminal in which a bar can be redrawn by cursor movement.

    Two cases need extra checks. Rich treats any file as a terminal if FORCE_COLOR is set, as Jupyter does for its child
    processes. And Jupyter runs a `!command` in a terminal, but does not interpret cursor movement in its output.
    """
    return file.isatty() and console.is_terminal and not console.is_dumb_terminal and env.get("JPY_PARENT_PID") is None
