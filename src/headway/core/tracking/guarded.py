"""Wrapper that prevents a failing tracker from ending the training."""

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from headway.core.runtime.seed import preserve_rng_states
from headway.core.tracking.base import TAKES, TrackedRun, Tracker
from headway.core.tracking.pictures import Picture
from headway.core.tracking.selection import Choice
from headway.errors import ConfigError
from headway.log import get_logger

log = get_logger(__name__)
MAX_FAILURES = 3
"""Number of failures in a row after which a tracker is not called any more."""
SLOW_CALL_SECONDS = 1.0
"""Seconds after which the call of a `log` method causes a warning."""
SLOW_FINISH_SECONDS = 15.0
"""Seconds after which the call of `finish` causes a warning."""


class GuardedTracker:
    """Wrapper that catches the exceptions of a tracker, and stops calling it after three failures in a row.

    A tracker that cannot be created, or cannot start a run, is never called again.

    Args:
        name: Name of the tracker.
        report: Bound method that records a failure in the run log. Its arguments are the name of an event, a step
            (always None here), and details. Only a weak reference to its object is kept.

    Attributes:
        name: Name of the tracker.
        tracker: The tracker; None before `build`, or if it could not be created.
        is_dropped: Whether the tracker is not called any more, because it has failed.
    """

    def __init__(self, name: str, report: Callable[[str, int | None, Mapping[str, Any]], None]) -> None:
        self.name = name
        self.tracker: Tracker | None = None
        self.is_dropped = False
        self._report = weakref.WeakMethod(report)
        self._num_failures = 0  # in a row
        self._is_warned = False  # whether a failure has been logged

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
    def accepted_kind(self) -> str:
        """Kind of values that the tracker's `log` accepts: "numbers", "objects" or "given" (see `Tracker.takes`)."""
        return getattr(self.tracker, "takes", "numbers")

    def begin(self, run: TrackedRun) -> None:
        """Start a run of the tracker. If this fails, the tracker is dropped at once."""
        if self.is_used:
            self._call_guarded("begin", lambda: self.tracker.begin(run), is_fatal=True)  # type: ignore[union-attr]

    def read_identity(self) -> dict[str, Any] | None:
        """Return the tracker's identity. Return None if it has none, if reading it fails, or if the tracker is not used."""
        identity: dict[str, Any] | None = None

        def read() -> None:
            nonlocal identity
            identity = self.tracker.identity  # type: ignore[union-attr]

        if self.is_used:
            self._call_guarded("identity", read)
        return identity

    # ---------------------------------------------------------------- methods of the tracker
    # Parameters are positional-only, so that an entry of `log_kwargs` with such a name is an error of the tracker's method.

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the configuration of the run, as `Tracker.store_init_configuration` does."""
        self._call("store_init_configuration", lambda tracker: tracker.store_init_configuration(values))

    def log(self, values: dict[str, Any], /, **kwargs: Any) -> None:
        """Log the values of one step, as `Tracker.log` does.

        Args:
            values: Values by name.
            kwargs: `step`, and the entry of this tracker in `log_kwargs`.
        """
        self._call("log", lambda tracker: tracker.log(values, **kwargs))

    def log_images(self, values: Mapping[str, Sequence[Picture]], /, **kwargs: Any) -> None:
        """Log the images of one step, as `Tracker.log_images` does.

        Args:
            values: Sequence of images for each name.
            kwargs: `step`, and the entry of this tracker in `log_kwargs`.
        """
        self._call("log_images", lambda tracker: tracker.log_images(values, **kwargs))

    def log_artifact(self, path: Path, name: str, /, **kwargs: Any) -> None:
        """Log a file or a folder, as `Tracker.log_artifact` does.

        Args:
            path: Path of the file or folder.
            name: Name of the artifact.
            kwargs: `step`, and the entry of this tracker in `log_kwargs`.
        """
        self._call("log_artifact", lambda tracker: tracker.log_artifact(path, name, **kwargs))

    def log_event(self, name: str, details: Mapping[str, Any], step: int) -> None:
        """Log a run event, as `Tracker.log_event` does."""
        self._call("log_event", lambda tracker: tracker.log_event(name, details, step=step))

    def rewind(self, step: int) -> None:
        """Discard values of later steps, as `Tracker.rewind` does."""
        self._call("rewind", lambda tracker: tracker.rewind(step))

    def flush(self) -> None:
        """Write buffered values to disk, as `Tracker.flush` does."""
        self._call("flush", lambda tracker: tracker.flush())

    def finish(self) -> None:
        """End the run, as `Tracker.finish` does."""
        self._call("finish", lambda tracker: tracker.finish())

    def _call(self, method: str, function: Callable[[Tracker], object]) -> None:
        """Call a function with the tracker, and catch its exceptions.

        Do nothing if the tracker could not be created, or was dropped after earlier failures. If calls of its `log`
        methods take longer than 1 s, a warning is issued once per method.

        Args:
            method: Name of the tracker's method that the function calls, for messages.
            function: Function to call.
        """
        tracker = self.tracker
        if tracker is None or self.is_dropped:
            return
        start = time.monotonic()
        self._call_guarded(method, lambda: function(tracker))
        seconds = time.monotonic() - start
        if seconds > SLOW_CALL_SECONDS and method.startswith("log"):
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
        """Count a failed call, log the first one, and stop using the tracker after a fatal error or `MAX_FAILURES` failures.

        Args:
            method: Name of the tracker's method.
            error: Error that it raised.
            is_fatal: Whether the tracker cannot be used after this error.
        """
        text = f"{type(error).__name__}: {error}"
        self._num_failures += 1
        self.is_dropped = is_fatal or self._num_failures >= MAX_FAILURES
        if not self._is_warned or self.is_dropped:
            outcome = "is used no more" if self.is_dropped else "failed"
            message_args = self.name, outcome, text[:1000], method
            log.warning("the tracker %s %s: %s in %s(); training continues", *message_args, main_process_only=False)
            self._is_warned = True
            event = "tracker_dropped" if self.is_dropped else "tracker_failed"
            report = self._report()
            if report is not None:
                report(event, None, {"tracker": self.name, "call": method, "error": text[:1000]})
