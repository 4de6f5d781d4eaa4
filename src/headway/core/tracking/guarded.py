"""Wrapper that prevents a failing tracker from ending the training."""

import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

from headway.core.runtime.seed import preserve_rng_states
from headway.core.tracking.base import TAKES, TrackedRun, Tracker
from headway.core.tracking.selection import Choice
from headway.errors import ConfigError
from headway.log import get_logger

log = get_logger(__name__)
NUM_FAILURES = 3
"""Number of failures in a row after which a tracker is not called any more."""
SLOW_CALL = 1.0
"""Seconds after which the call of a `log` method causes a warning."""
SLOW_FINISH = 15.0
"""Seconds after which the call of `finish` causes a warning."""


class GuardedTracker:
    """Wrapper that catches the exceptions of a tracker, and stops calling it after three failures in a row.

    Args:
        name: Name of the tracker.
        report: Bound method that records a failure in the run log. Its arguments are the name of an event, a step
            (always None here), and details. Only a weak reference to its object is kept.

    Attributes:
        tracker: The tracker; None before `build`, or if it could not be created.
        is_dropped: Whether the tracker is not called any more, because it has failed.
    """

    def __init__(self, name: str, report: Callable[[str, int | None, Mapping[str, Any]], None]) -> None:
        self.name = name
        self.tracker: Tracker | None = None
        self.is_dropped = False
        self._report = weakref.WeakMethod(report)
        self._num_failures = 0
        self._is_warned = False

    def build(self, choice: Choice, init_kwargs: Mapping[str, Any]) -> None:
        """Create the tracker with a factory, or use the user's instance.

        A tracker whose factory fails, or whose attribute `takes` is not allowed, is never called.

        Args:
            choice: Tracker or factory.
            init_kwargs: Arguments for the factory.
        """

        def make_tracker() -> None:
            tracker = choice if isinstance(choice, Tracker) else choice.make(**init_kwargs)
            takes = getattr(tracker, "takes", "numbers")
            if takes not in TAKES:
                raise ConfigError(f"takes={takes!r}; allowed: {', '.join(map(repr, TAKES))}")
            self.tracker = tracker

        self._call_guarded("__init__", make_tracker, is_fatal=True)

    @property
    def is_used(self) -> bool:
        """Whether the tracker could be created, and was not dropped after failures."""
        return self.tracker is not None and not self.is_dropped

    @property
    def takes(self) -> str:
        """Kind of values that the tracker's `log` accepts: "numbers", "objects" or "given" (see `Tracker.takes`)."""
        return getattr(self.tracker, "takes", "numbers")

    def begin(self, run: TrackedRun) -> None:
        """Start a run of the tracker. If this fails, the tracker is dropped at once."""
        if self.is_used:
            self._call_guarded("begin", lambda: self.tracker.begin(run), is_fatal=True)  # type: ignore[union-attr]

    def read_identity(self) -> dict[str, Any] | None:
        """Return the tracker's identity. Return None if it has none, cannot be read, or the tracker is not used."""
        identity: dict[str, Any] | None = None

        def read() -> None:
            nonlocal identity
            identity = self.tracker.identity  # type: ignore[union-attr]

        if self.is_used:
            self._call_guarded("identity", read)
        return identity

    def call(self, method: str, /, *args: Any, **kwargs: Any) -> None:
        """Call a method of the tracker, and catch its exceptions.

        Do nothing if the tracker could not be created, or was dropped after earlier failures. If calls of its `log`
        methods take longer than 1 s, a warning is issued once per method.

        Args:
            method: Name of the method.
            args: Positional arguments for the method.
            kwargs: Keyword arguments for the method.
        """
        if not self.is_used:
            return
        start = time.monotonic()
        self._call_guarded(method, lambda: getattr(self.tracker, method)(*args, **kwargs))
        seconds = time.monotonic() - start
        if seconds > SLOW_CALL and method.startswith("log"):
            log.warning_once("the tracker %s is slow: training waits for it in %s()", self.name, method)

    def _call_guarded(self, method: str, function: Callable[[], Any], is_fatal: bool = False) -> None:
        """Call a function, and count its exceptions as failures of the tracker.

        Args:
            method: Name of the tracker's method that the function calls, for messages.
            function: Function to call.
            is_fatal: Whether the tracker is dropped at the first failure. Default: False.
        """
        # Starting and ending a run draw random numbers (run names), so the RNG states are preserved. Around each log() this
        # would cost more than the log itself.
        is_rare = not method.startswith("log") and method != "flush"
        try:
            with preserve_rng_states() if is_rare else nullcontext():
                function()
        except Exception as error:
            self._count_failure(method, error, is_fatal)
        else:
            self._num_failures = 0

    def _count_failure(self, method: str, error: Exception, is_fatal: bool) -> None:
        text = f"{type(error).__name__}: {error}"
        self._num_failures += 1
        self.is_dropped = is_fatal or self._num_failures >= NUM_FAILURES
        if not self._is_warned or self.is_dropped:
            outcome = "is used no more" if self.is_dropped else "failed"
            message_args = self.name, outcome, text[:1000], method
            log.warning("the tracker %s %s: %s in %s(); training goes on", *message_args, main_process_only=False)
            self._is_warned = True
            event = "tracker_dropped" if self.is_dropped else "tracker_failed"
            report = self._report()
            if report is not None:
                report(event, None, {"tracker": self.name, "call": method, "error": text[:1000]})
