"""A progress bar in a notebook's output: HTML that is drawn anew in its place, without any widget library."""

import sys
from html import escape
from typing import Any

_STYLE = "font-family: var(--jp-code-font-family, monospace); font-size: 13px; white-space: pre-wrap; margin: 2px 0"


def in_notebook() -> bool:
    """Does this code run in a Jupyter kernel, whose outputs can be drawn anew? IPython on a terminal is none."""
    interactive = sys.modules.get("IPython")
    shell = interactive.get_ipython() if interactive is not None else None
    return shell is not None and getattr(shell, "kernel", None) is not None


def html(description: str, num_done: int, total: int | None, facts: str) -> str:
    """The bar as it stands."""
    bar = f'<progress value="{num_done}" max="{total or 1}" style="width: 200px; vertical-align: middle"></progress>'
    head = f"{escape(description)} " if description else ""
    return f'<div style="{_STYLE}">{head}{bar if total else ""} {escape(facts)}</div>'


class NotebookBar:
    """One bar in the output of the cell that runs."""

    def __init__(self) -> None:
        self._handle: Any = None

    def show(self, description: str, num_done: int, total: int | None, facts: str) -> None:
        """Draw it, in the place where it was drawn before."""
        from IPython.display import display

        # Front ends that draw no HTML show the text.
        data = {
            "text/html": html(description, num_done, total, facts),
            "text/plain": f"{description}: {facts}" if description else facts,
        }
        if self._handle is None:
            self._handle = display(data, raw=True, display_id=True)  # type: ignore[no-untyped-call]
        else:
            self._handle.update(data, raw=True)


class NotebookTable:
    """A table in the output of the cell that runs, drawn anew in its place."""

    def __init__(self) -> None:
        self._handle: Any = None

    def show(self, rows: list[dict[str, str]]) -> None:
        """Draw the rows; the columns are those that any of them has, in the order of their first appearance."""
        from IPython.display import display

        columns = list(dict.fromkeys(name for row in rows for name in row))
        head = "".join(f"<th>{escape(name)}</th>" for name in columns)
        body = "".join(
            "<tr>" + "".join(f"<td>{escape(row.get(name, ''))}</td>" for name in columns) + "</tr>" for row in rows
        )
        data = {
            "text/html": f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>",
            "text/plain": "\n".join(", ".join(f"{name} {value}" for name, value in row.items()) for row in rows),
        }
        if self._handle is None:
            self._handle = display(data, raw=True, display_id=True)  # type: ignore[no-untyped-call]
        else:
            self._handle.update(data, raw=True)
