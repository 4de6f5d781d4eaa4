"""Wait for other machines until a deadline, with messages at increasing intervals."""

import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

from headway.errors import LaunchError

T = TypeVar("T")

FIRST_MESSAGE = 2.0
"""Seconds to wait before the first message. Machines that are started together usually arrive within this time."""

POLL_SECONDS = 0.2
"""Seconds between two checks of the awaited condition."""

REPEATED_MESSAGES = (30.0, 120.0, 300.0)
"""Seconds of waiting after which the message is repeated. Afterward it is repeated every five minutes."""


class RendezvousWait:
    """Deadline of a wait for other machines, with messages at increasing intervals.

    Args:
        print_line: Function that prints a line.
        seconds: Seconds until the deadline; infinite for no deadline.
        setting: Setting that determines the deadline, such as "--timeout".
        is_quiet: Whether to print nothing, because another process prints to the same screen. Default: False.

    Attributes:
        has_printed: Whether a message has been printed.
    """

    def __init__(self, print_line: Callable[[str], None], seconds: float, setting: str, is_quiet: bool = False) -> None:
        self._print_line = print_line
        self.seconds = seconds
        self.setting = setting
        self._is_quiet = is_quiet
        self._begun = time.monotonic()
        self._due = FIRST_MESSAGE
        self.has_printed = False

    @property
    def is_over(self) -> bool:
        """Whether the deadline has passed."""
        return time.monotonic() - self._begun > self.seconds

    def print_if_due(self, what: str) -> None:
        """Print a message about the wait if one is due. This method can be called any number of times.

        Args:
            what: Sentence that describes the wait, without its end time.
        """
        waited = time.monotonic() - self._begun
        if self._is_quiet or waited < self._due:
            return
        self._due = next((seconds for seconds in REPEATED_MESSAGES if seconds > waited), waited + REPEATED_MESSAGES[-1])
        self.has_printed = True
        self._print_line(f"headway: {what}, {self._describe_end(waited)}")

    def _describe_end(self, waited: float) -> str:
        """Return a phrase that names the end of the wait.

        Args:
            waited: Seconds since the wait began.
        """
        if math.isinf(self.seconds):
            return f"for as long as it takes ({self.setting})"
        clock = time.strftime("%H:%M:%S", time.localtime(time.time() + self.seconds - waited))
        return f"until {clock} ({self.seconds:g} s: {self.setting})"

    def describe_limit(self) -> str:
        """Return the deadline and the setting that determines it, as part of an error message."""
        return f"within {self.seconds:g} s ({self.setting} allows more)"

    def report_end(self, what: str) -> None:
        """Report the end of the wait if its start was reported.

        Args:
            what: Sentence that describes the result.
        """
        if self.has_printed:
            self._print_line(f"headway: {what}")


def call_in_time(make: Callable[[], T], waiting: RendezvousWait, what: str, on_late: str) -> T:
    """Call a function on a thread and return its result, or raise an error when the deadline of a wait has passed.

    The thread is needed because a library call cannot be interrupted.

    Args:
        make: Function to call. Its exceptions propagate.
        waiting: Deadline and messages of the wait.
        what: Message for a long wait.
        on_late: Error message if the deadline passes.

    Raises:
        LaunchError: If the call does not return before the deadline.
    """
    made: Future[T] = Future()

    def run() -> None:
        try:
            made.set_result(make())
        except BaseException as error:
            made.set_exception(error)

    threading.Thread(target=run, name="meeting", daemon=True).start()
    while not wait([made], POLL_SECONDS).done:
        waiting.print_if_due(what)
        if waiting.is_over:
            raise LaunchError(on_late)
    return made.result()
