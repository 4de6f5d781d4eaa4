"""Progress of a loop: a live bar on a terminal or in a notebook, one plain line per interval elsewhere; on one rank only."""

import math
import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from html import escape
from typing import Any, Generic, TextIO, TypeVar

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column

from headway.common import env, scope
from headway.common.text import format_bytes, format_seconds
from headway.errors import ConfigError
from headway.runtime import events
from headway.runtime.process import current
from headway.runtime.transfers import Readback

_STYLE = "font-family: var(--jp-code-font-family, monospace); font-size: 13px; white-space: pre-wrap; margin: 2px 0"


def in_notebook() -> bool:
    """Does this code run in a Jupyter kernel, whose outputs can be redrawn? IPython on a terminal is not one."""
    interactive = sys.modules.get("IPython")
    shell = interactive.get_ipython() if interactive is not None else None
    kernel = None if shell is None else getattr(shell, "kernel", None)
    # A forked child has the kernel's objects, but nobody listens to it.
    return kernel is not None and getattr(getattr(kernel, "session", None), "pid", os.getpid()) == os.getpid()


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

    def show(self, bar: "track[Any]") -> None:
        """Draw the bar as it stands, in the place where it was drawn before."""
        facts, moved = bar.facts(), ""
        if bar.total:
            size = "width: 200px; vertical-align: middle"
            moved = f'<progress value="{bar._num_done}" max="{bar.total}" style="{size}"></progress>'
        head = f"{escape(bar.description)} " if bar.description else ""
        html = f'<div style="{_STYLE}">{head}{moved} {escape(facts)}</div>'
        self._lines[id(bar)] = html, f"{bar.description}: {facts}" if bar.description else facts
        self._redraw_lines()

    def remove(self, bar: "track[Any]") -> None:
        """Take the bar away."""
        if self._lines.pop(id(bar), None) is not None:
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


Item = TypeVar("Item")


_BAR = 24
_SEPARATOR = " | "
_BROKEN_OFF = 1.0
"""Seconds that a loop which was broken off waits for its last values."""


class _Live(list[Progress]):
    """The bars that are live on this process's terminal; an inner loop adds a line to the outer one's."""


class _Cells(list[NotebookBar]):
    """The same in its notebook."""


class track(Generic[Item]):  # noqa: N801  (used like a function, as tqdm is)
    """Iterate with progress: count, values, rates, memory, time left.

    Example::

        bar = track(loader, description="epoch 0")
        for inputs, targets in bar:
            ...
            bar.show(loss=loss)
            bar.add(tokens=targets.numel())

    Args:
        iterable: what to iterate over.
        description: what the line begins with.
        total: how many items there will be, those done before included; None: the iterable's length where it has one.
        initial: how many of them were done before; None: 0, or where a prepared loader was resumed.
        main_process_only: only rank 0 shows anything; False: the first process of each machine does too.
        interval: seconds between plain lines where the output is not a terminal.
        file: where to write; default: standard error.
    """

    def __init__(
        self,
        iterable: Iterable[Item],
        *,
        description: str = "",
        total: int | None = None,
        initial: int | None = None,
        main_process_only: bool = True,
        interval: float = 10.0,
        file: TextIO | None = None,
    ) -> None:
        runtime = current()
        self._iterable, self.description = iterable, description
        self.total = total if total is not None else _length(iterable)
        self._is_shown = runtime.is_main_process if main_process_only else runtime.is_local_main_process
        self._interval = interval
        self._file = file or sys.stderr
        self._values: dict[str, Any] = {}
        self._read: dict[str, float] = {}
        self._asked: dict[str, Readback] | None = None
        self._counts: dict[str, float] = {}
        self._initial = initial
        self._num_before = self._num_done = initial or 0
        self._is_over = self._is_broken_off = False
        self._start = time.monotonic()

    def show(self, **values: float | str | torch.Tensor) -> None:
        """Show these values from now on (a float with four digits).

        Args:
            values: a tensor holds one number; it is read when the bar is drawn. On an accelerator the host does not wait for
                it: the bar shows the latest value that has arrived, and at the end of the loop the last one.

        Raises:
            ConfigError: a tensor with several numbers.
        """
        for name, value in values.items():
            if isinstance(value, torch.Tensor) and value.numel() != 1:
                raise ConfigError(
                    f"show({name}=...) got a tensor of shape {tuple(value.shape)}; give one number, such as {name}.mean()"
                )
            self._values[name] = value.detach() if isinstance(value, torch.Tensor) else value
            if not isinstance(value, torch.Tensor):
                self._read.pop(name, None)

    def add(self, **counts: float) -> None:
        """Count things; shown as a rate: `add(tokens=512)` gives "3,210 tokens/s", all ranks' work as given."""
        for name, count in counts.items():
            self._counts[name] = self._counts.get(name, 0.0) + count

    def facts(self, width: int | None = None) -> str:
        """What stands behind the bar: count, values, rates, memory, time left.

        Args:
            width: characters there is room for; what matters least is left out until the rest fits. None: all of it.
        """
        parts = self._parts()
        text = _SEPARATOR.join(part for _, part in parts)
        while width is not None and len(text) > width and (least := max(rank for rank, _ in parts)):
            parts = [(rank, part) for rank, part in parts if rank < least]
            text = _SEPARATOR.join(part for _, part in parts)
        return text

    def _parts(self) -> list[tuple[int, str]]:
        """Each fact with its rank: 0 stays whatever happens, the highest goes first."""
        elapsed, num_moved = max(time.monotonic() - self._start, 1e-9), self._num_done - self._num_before
        parts = [(0, f"{self._num_done}/{self.total}" if self.total is not None else str(self._num_done))]
        # The values shown first are those that are looked at.
        parts += [
            (min(number, 1) * (3 + number), f"{name} {_number(value)}")
            for number, (name, value) in enumerate(self._known().items())
        ]
        parts += [(1, f"{count / elapsed:,.0f} {name}/s") for name, count in self._counts.items()]
        if not self._counts:
            parts.append((1, f"{num_moved / elapsed:,.1f}/s"))
        parts.append((2, format_bytes(current().hardware.process_memory())))
        parts += [(3, source()) for source in events.facts()]
        if self._is_over or (self.total is not None and self._num_done >= self.total):
            parts.append((0, f"in {format_seconds(elapsed)}"))
        elif self.total is not None and num_moved:
            left = elapsed / num_moved * max(0, self.total - self._num_done)
            parts.append((0, f"{format_seconds(left)} left"))
        else:
            parts.append((0, format_seconds(elapsed)))
        return parts

    def _known(self) -> dict[str, float | str]:
        """The values whose numbers are on the host."""
        known: dict[str, float | str] = {}
        for name, value in self._values.items():
            if not isinstance(value, torch.Tensor):
                known[name] = value
            elif value.device.type == "cpu":
                known[name] = value.item()
            elif name in self._read:
                known[name] = self._read[name]
        return known

    def _request_values(self) -> None:
        """A drawing is due: it waits until the values' numbers have come from the device, and the loop does not."""
        if self._asked is None:
            tensors = {name: value for name, value in self._values.items() if isinstance(value, torch.Tensor)}
            self._asked = {name: Readback(each) for name, each in tensors.items() if each.device.type != "cpu"}

    def _read_values(self) -> bool:
        """Take the numbers that were asked for, once all of them are on the host; False: not yet, or nothing is due."""
        if self._asked is None or not all(asked.is_there for asked in self._asked.values()):
            return False
        self._read.update((name, asked.read().item()) for name, asked in self._asked.items())
        self._asked = None
        return True

    def _end(self) -> None:
        """The loop is over, or was broken off: its last values are waited for.

        Not for long where it was broken off: what did that may be a failure elsewhere, for which the device would wait for ever.
        """
        self._is_over, self._asked = True, None
        deadline = time.monotonic() + (_BROKEN_OFF if self._is_broken_off else math.inf)
        with suppress(RuntimeError):  # the device has failed, and what ends the loop says why
            self._request_values()
            while not self._read_values() and time.monotonic() < deadline:
                time.sleep(0.001)

    def __len__(self) -> int:
        if self.total is None:
            raise TypeError(f"{type(self._iterable).__name__} has no length, and track() was given no total")
        return self.total

    def __iter__(self) -> Iterator[Item]:
        self._num_before = _num_resumed(self._iterable) if self._initial is None else self._initial
        self._start, self._num_done, self._is_over = time.monotonic(), self._num_before, False
        self._is_broken_off = True  # until the loop has come to its end
        self._counts.clear()
        if not self._is_shown:
            yield from self._iterable
            return
        display = self._open_display()
        last = self._start if isinstance(display, _Lines) else 0.0
        try:
            for item in self._iterable:
                yield item
                self._num_done += 1
                now = time.monotonic()
                if now - last >= display.interval:
                    last = now
                    self._request_values()
                if self._read_values():
                    display.draw(self)
            else:
                self._is_broken_off = False
        finally:  # also where the loop broke off
            self._end()
            display.close(self)

    def _open_display(self) -> "_Terminal | _Cell | _Lines":
        if self._file is sys.stderr and in_notebook():
            return _Cell()
        console = Console(file=self._file)
        return _Terminal(self, console) if _is_live_possible(console, self._file) else _Lines(self)


class _Lines:
    """A line now and then, as files have them."""

    def __init__(self, bar: "track[Any]") -> None:
        self.interval = bar._interval
        self._num_shown = -1

    def draw(self, bar: "track[Any]") -> None:
        """Write a line."""
        self._num_shown = bar._num_done
        head = f"{bar.description}: " if bar.description else ""
        print(f"{head}{bar.facts()}", file=bar._file, flush=True)

    def close(self, bar: "track[Any]") -> None:
        """Write the last line."""
        if self._num_shown != bar._num_done:
            self.draw(bar)


class _Terminal:
    """A bar that moves; an inner loop adds a line to the outer one's."""

    interval = 0.2

    def __init__(self, bar: "track[Any]", console: Console) -> None:
        self._room = console.width - len(bar.description) - _BAR - 3
        self._live = scope.own(_Live)
        self._is_outermost = not self._live
        if self._is_outermost:
            self._live.append(_new_bars(console))
            self._live[0].start()
        self._task = self._live[0].add_task(bar.description, total=bar.total, facts="")

    def draw(self, bar: "track[Any]") -> None:
        """Move the bar."""
        self._live[0].update(self._task, completed=bar._num_done, facts=bar.facts(self._room))

    def close(self, bar: "track[Any]") -> None:
        """Leave the outermost bar as it stands, and take an inner one away."""
        self.draw(bar)
        if self._is_outermost:
            self._live.pop().stop()
        else:
            self._live[0].remove_task(self._task)


class _Cell:
    """The same in the output of a notebook's cell."""

    interval = 0.2

    def __init__(self) -> None:
        self._cells = scope.own(_Cells)
        self._is_outermost = not self._cells
        if self._is_outermost:
            self._cells.append(NotebookBar())

    def draw(self, bar: "track[Any]") -> None:
        """Draw the bar again."""
        self._cells[0].show(bar)

    def close(self, bar: "track[Any]") -> None:
        """Leave the outermost bar as it stands, and take an inner one away."""
        if self._is_outermost:
            self.draw(bar)
            self._cells.pop()
        else:
            self._cells[0].remove(bar)


def _new_bars(console: Console) -> Progress:
    whole = Column(no_wrap=True, overflow="ellipsis")
    return Progress(
        TextColumn("{task.description}", table_column=Column(no_wrap=True)),
        BarColumn(bar_width=_BAR),
        TextColumn("{task.fields[facts]}", style="dim", markup=False, table_column=whole),
        console=console,
        refresh_per_second=4,
        # Lines printed in the loop go above the bar, but not where standard output is a file of its own.
        redirect_stdout=sys.stdout.isatty(),
        redirect_stderr=sys.stderr.isatty(),
    )


def _is_live_possible(console: Console, file: TextIO) -> bool:
    """Is it a terminal, and one that moves its cursor?

    Rich takes a file for one where FORCE_COLOR is set, as Jupyter does for its children. To a `!command` it gives a terminal, but
    shows its escapes one after the other.
    """
    return file.isatty() and console.is_terminal and not console.is_dumb_terminal and env.get("JPY_PARENT_PID") is None


def _num_resumed(iterable: Any) -> int:
    """Batches of a prepared loader that were consumed before the checkpoint that its next pass goes on from."""
    consumed, size = getattr(iterable, "num_consumed", 0), getattr(iterable, "total_batch_size", None)
    is_running = getattr(iterable, "is_running", True)  # a pass that was broken off is not gone on with
    return consumed // size if isinstance(consumed, int) and isinstance(size, int) and size and not is_running else 0


def _length(iterable: Any) -> int | None:
    try:
        return len(iterable)
    except TypeError:
        return None


def _number(value: float | str) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
