"""A progress bar in a notebook's output: HTML that is redrawn in place, without any widget library."""

import os
import sys
from html import escape
from typing import Any

_STYLE = "font-family: var(--jp-code-font-family, monospace); font-size: 13px; white-space: pre-wrap; margin: 2px 0"


def in_notebook() -> bool:
    """Does this code run in a Jupyter kernel, whose outputs can be redrawn? IPython on a terminal is not one."""
    interactive = sys.modules.get("IPython")
    shell = interactive.get_ipython() if interactive is not None else None
    kernel = None if shell is None else getattr(shell, "kernel", None)
    # A forked child has the kernel's objects, but nobody listens to it.
    return kernel is not None and getattr(getattr(kernel, "session", None), "pid", os.getpid()) == os.getpid()


def html(description: str, num_done: int, total: int | None, facts: str) -> str:
    """The bar as it stands."""
    bar = f'<progress value="{num_done}" max="{total or 1}" style="width: 200px; vertical-align: middle"></progress>'
    head = f"{escape(description)} " if description else ""
    return f'<div style="{_STYLE}">{head}{bar if total else ""} {escape(facts)}</div>'


class _Output:
    """A place in the output of the cell that runs, redrawn; front ends that draw no HTML show the text."""

    def __init__(self) -> None:
        self._handle: Any = None

    def _redraw(self, html: str, text: str) -> None:
        from IPython.display import display

        data = {"text/html": html, "text/plain": text}
        if self._handle is None:
            self._handle = display(data, raw=True, display_id=True)  # type: ignore[no-untyped-call]
        else:
            self._handle.update(data, raw=True)


class NotebookBar(_Output):
    """A bar, with those of inner loops below it while they run."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: dict[int, tuple[str, str]] = {}

    def show(self, owner: object, description: str, num_done: int, total: int | None, facts: str) -> None:
        """Draw the owner's bar, in the place where it was drawn before."""
        text = f"{description}: {facts}" if description else facts
        self._lines[id(owner)] = html(description, num_done, total, facts), text
        self._redraw_lines()

    def remove(self, owner: object) -> None:
        """Take the owner's bar away."""
        if self._lines.pop(id(owner), None) is not None:
            self._redraw_lines()

    def _redraw_lines(self) -> None:
        lines = self._lines.values()
        self._redraw("".join(line for line, _ in lines), "\n".join(text for _, text in lines))


class NotebookTable(_Output):
    """A table."""

    def show(self, rows: list[dict[str, str]]) -> None:
        """Draw the rows; the columns are those that any of them has, in the order of their first appearance."""
        columns = list(dict.fromkeys(name for row in rows for name in row))
        cells = ["".join(f"<td>{escape(row.get(name, ''))}</td>" for name in columns) for row in rows]
        head = "".join(f"<th>{escape(name)}</th>" for name in columns)
        body = "".join(f"<tr>{each}</tr>" for each in cells)
        self._redraw(
            f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>",
            "\n".join(", ".join(f"{name} {value}" for name, value in row.items()) for row in rows),
        )
