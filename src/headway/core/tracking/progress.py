"""Progress of a loop on one rank: a live bar in a terminal or notebook, or else one line of text per interval."""

import math
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any, Generic, TextIO, TypeVar

import torch
from rich.console import Console

from headway.common.text import format_bytes, format_seconds
from headway.core.runtime import events
from headway.core.runtime.process import current
from headway.core.runtime.readback import Readback
from headway.core.tracking.progress_outputs import (
    SEPARATOR,
    CellOutput,
    LinesOutput,
    TerminalOutput,
    is_in_notebook,
    is_live_possible,
)
from headway.errors import ConfigError

Item = TypeVar("Item")
_INTERRUPTED_TIMEOUT = 1.0
"""Maximum number of seconds for which an interrupted loop waits for copies of device tensors to the host."""


class track(Generic[Item]):  # noqa: N801  (used like a function, as tqdm is)
    """Iterable that loops over the items of another iterable and shows the progress, as `tqdm` does.

    It shows the number of items, values, rates, memory and the remaining time: as a live bar in a terminal or notebook,
    else as lines of text. Use it on every rank; only one rank shows it, and no rank waits.

    Args:
        iterable: Iterable to loop over, such as a prepared loader.
        description: Text at the start of the line. Default: "".
        total: Total number of items, including those before a resume. None (the default): the length of the iterable,
            if it has one.
        initial: Number of items that were done before a resume. None (the default): the position of a resumed prepared
            loader, else 0.
        main_process_only: Whether only rank 0 shows progress. False: the first process of each machine does. Default:
            True.
        interval: Seconds between lines of text if the output is not a terminal. Default: 10.
        file: File to write to. None (the default): standard error.

    Example::

        bar = track(loader, description="epoch 0")
        for inputs, targets in bar:
            loss = loss_fn(model(inputs), targets)
            bar.show(loss=loss)
            bar.add(tokens=targets.numel())
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
        self._iterable = iterable
        self.description = description
        self.total = total if total is not None else _get_length(iterable)
        self._is_shown = runtime.is_main_process if main_process_only else runtime.is_local_main_process
        self._interval = interval
        self._file = file or sys.stderr
        self._values: dict[str, Any] = {}  # as passed to `show`
        self._read_values: dict[str, float] = {}  # latest numbers of device tensors that were copied to the host
        self._pending_copies: dict[str, Readback] | None = None  # copies in progress; None if there are none
        self._counts: dict[str, float] = {}  # sums of what was passed to `add`
        self._initial = initial
        self._num_before = initial or 0  # items done before this loop
        self._num_done = self._num_before  # items done in total
        self._is_over = False  # whether the loop has ended
        self._is_interrupted = False  # whether it was ended by an error or Ctrl+C
        self._start = time.monotonic()  # when the loop began

    def show(self, **values: float | str | torch.Tensor) -> None:
        """Show the values next to the bar until they are replaced. Floats have four significant digits.

        Args:
            values: Values by name. A tensor must contain one number, which is read when the bar is drawn. On an
                accelerator the host does not wait for it. The bar then shows the latest number that has been copied to
                the host, and at the end of the loop the last one.

        Raises:
            ConfigError: If a tensor contains several numbers.
        """
        for name, value in values.items():
            if isinstance(value, torch.Tensor) and value.numel() != 1:
                raise ConfigError(
                    f"show({name}=...) got a tensor of shape {tuple(value.shape)}; give one number, such as {name}.mean()"
                )
            self._values[name] = value.detach() if isinstance(value, torch.Tensor) else value
            if not isinstance(value, torch.Tensor):
                self._read_values.pop(name, None)

    def add(self, **counts: float) -> None:
        """Add to counters that are shown as rates, as in `add(tokens=512)` for "3,210 tokens/s".

        Only this rank's numbers are counted. They are not summed over ranks.

        Args:
            counts: Amounts to add, by the counters' names.
        """
        for name, count in counts.items():
            self._counts[name] = self._counts.get(name, 0.0) + count

    @property
    def num_done(self) -> int:
        """Number of items done, including those before a resume."""
        return self._num_done

    def facts(self, width: int | None = None) -> str:
        """Return the text next to the bar: number of items, values, rates, memory of this process, remaining time.

        Args:
            width: Available characters. The least important parts are left out until the rest fits. Some parts, such as
                the number of items, are always shown. Default: None, for no limit.
        """
        parts = self._make_parts()
        text = SEPARATOR.join(part for _, part in parts)
        while width is not None and len(text) > width:
            least_important = max(priority for priority, _ in parts)
            if least_important == 0:
                break
            parts = [(priority, part) for priority, part in parts if priority < least_important]
            text = SEPARATOR.join(part for _, part in parts)
        return text

    def _make_parts(self) -> list[tuple[int, str]]:
        """Return pairs of (priority, text) for the parts of the line.

        Parts with priority 0 are always shown. If the line is too long, the parts with the largest priority number
        are left out first.
        """
        elapsed = max(time.monotonic() - self._start, 1e-9)
        num_new = self._num_done - self._num_before  # without those before a resume
        parts = [(0, f"{self._num_done}/{self.total}" if self.total is not None else str(self._num_done))]
        # Users look at the first values most: the first one is always shown, the last ones are left out first.
        for index, (name, value) in enumerate(self._collect_values().items()):
            priority = 0 if index == 0 else 3 + index
            parts.append((priority, f"{name} {_format_number(value)}"))
        parts += [(1, f"{count / elapsed:,.0f} {name}/s") for name, count in self._counts.items()]
        if not self._counts:
            parts.append((1, f"{num_new / elapsed:,.1f}/s"))
        parts.append((2, format_bytes(current().hardware.get_process_memory())))
        parts += [(3, make_text()) for make_text in events.get_progress_texts()]
        if self._is_over or (self.total is not None and self._num_done >= self.total):
            parts.append((0, f"in {format_seconds(elapsed)}"))
        elif self.total is not None and num_new:
            remaining_seconds = elapsed / num_new * max(0, self.total - self._num_done)
            parts.append((0, f"{format_seconds(remaining_seconds)} left"))
        else:
            parts.append((0, format_seconds(elapsed)))
        return parts

    def _collect_values(self) -> dict[str, float | str]:
        """Return the values to show, by name. Device tensors are replaced by the latest number copied to the host."""
        shown: dict[str, float | str] = {}
        for name, value in self._values.items():
            if not isinstance(value, torch.Tensor):
                shown[name] = value
            elif value.device.type == "cpu":
                shown[name] = value.item()
            elif name in self._read_values:
                shown[name] = self._read_values[name]
        return shown

    def _start_copies(self) -> None:
        """Start copying the values of device tensors to the host, without blocking the loop.

        Nothing is started if an earlier copy has not been read yet.
        """
        if self._pending_copies is None:
            tensors = {name: value for name, value in self._values.items() if isinstance(value, torch.Tensor)}
            self._pending_copies = {
                name: Readback(tensor) for name, tensor in tensors.items() if tensor.device.type != "cpu"
            }

    def _read_copies(self) -> bool:
        """Read the values of device tensors if all copies to the host are complete.

        Return whether they were read. False if some copies are not complete, or if none were started.
        """
        copies = self._pending_copies
        if copies is None or not all(copy.is_ready for copy in copies.values()):
            return False
        self._read_values.update((name, copy.read().item()) for name, copy in copies.items())
        self._pending_copies = None
        return True

    def _end_loop(self) -> None:
        """Mark the loop as ended, and wait until the values of device tensors from its last iterations are on the host.

        After an interrupted loop the wait is at most 1 s. If a failure on another rank caused the interruption, the
        device might never finish.
        """
        self._is_over = True
        self._pending_copies = None
        deadline = time.monotonic() + (_INTERRUPTED_TIMEOUT if self._is_interrupted else math.inf)
        with suppress(RuntimeError):  # the device has failed, and the error that ends the loop explains it
            self._start_copies()
            while not self._read_copies() and time.monotonic() < deadline:
                time.sleep(0.001)

    def __len__(self) -> int:
        if self.total is None:
            raise TypeError(f"{type(self._iterable).__name__} has no length, and track() was given no total")
        return self.total

    def __iter__(self) -> Iterator[Item]:
        self._num_before = _count_resumed(self._iterable) if self._initial is None else self._initial
        self._start = time.monotonic()
        self._num_done = self._num_before
        self._is_over = False
        self._is_interrupted = True  # set to False when the loop completes
        self._counts.clear()
        if not self._is_shown:
            yield from self._iterable
            return
        display = self._open_display()
        last_drawn = self._start if isinstance(display, LinesOutput) else 0.0
        try:
            for item in self._iterable:
                yield item
                self._num_done += 1
                now = time.monotonic()
                if now - last_drawn >= display.interval:
                    last_drawn = now
                    self._start_copies()
                if self._read_copies():
                    display.draw(self)
            else:
                self._is_interrupted = False
        finally:  # runs even if the loop is interrupted
            self._end_loop()
            display.close(self)

    def _open_display(self) -> "TerminalOutput | CellOutput | LinesOutput":
        """Return the output that fits where the bars are shown: a notebook cell, a live terminal, or lines of a log file."""
        if self._file is sys.stderr and is_in_notebook():
            return CellOutput()
        console = Console(file=self._file)
        if is_live_possible(console, self._file):
            return TerminalOutput(self, console)
        return LinesOutput(self._file, self._interval)


def _count_resumed(iterable: Any) -> int:
    """Return the number of batches that a prepared loader had consumed when the loaded checkpoint was saved.

    0 if the loader was not resumed in the middle of an epoch, or is not a prepared loader.
    """
    num_consumed, batch_size = getattr(iterable, "num_consumed", 0), getattr(iterable, "total_batch_size", None)
    is_running = getattr(iterable, "is_running", True)  # an interrupted pass is not continued
    if is_running or not isinstance(num_consumed, int) or not isinstance(batch_size, int) or not batch_size:
        return 0
    return num_consumed // batch_size


def _get_length(iterable: Any) -> int | None:
    """Return the number of items of an iterable, or None if it has no length."""
    try:
        return len(iterable)
    except TypeError:
        return None


def _format_number(value: float | str) -> str:
    """Return a float with four significant digits, and other values as they are, as text."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
