"""Feed of one run on one rank: write the run log, and pass values on to trackers.

Errors in a tracker never reach the training loop. A failure is logged as a warning once and recorded in the run log.
After three failures in a row the tracker is dropped for this run. The run log still contains the values that the
tracker did not receive.

A process cannot know at its start whether it will resume a run or start over. If a resume is likely, the trackers
continue the run in the log. If the guess was wrong, the trackers are restarted::

    resumed, or a checkpoint exists to resume from          continue the tracker's run
    last start was killed, nothing else is known            continue, unless the first value indicates a new run
    last start ended                                        new run, unless a resume follows

Names of nested values are joined with '/'. Values can be numbers, 0-d tensors, NumPy scalars, strings, or objects
that only some trackers accept.
"""

import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from headway.common import env
from headway.core.runtime.readback import Readback
from headway.core.tracking.base import TrackedRun
from headway.core.tracking.guarded import SLOW_FINISH, GuardedTracker
from headway.core.tracking.pictures import Picture, make_file_name, number_images, write_png
from headway.core.tracking.runlog import MEASURED, RunLog, Value, convert_to_json
from headway.core.tracking.runlog_reader import LoggedRun, read_run
from headway.core.tracking.selection import Choice
from headway.core.tracking.values import describe_type, flatten, is_loggable, to_python
from headway.errors import StateError, TrackingError
from headway.log import get_logger

log = get_logger(__name__)


class RunFeed:
    """Run log and trackers of one run on this rank.

    Args:
        project: Name of the run.
        folder: Folder of the run; None if there is no run log.
        choices: Trackers of this rank.
        is_main: Whether this is rank 0, which writes the run log.
        get_num_updates: Function that returns the current number of optimizer updates.
        measure: Function that returns "memory" in bytes and "grad_norm" (a tensor, or None). They are written to the
            run log if the script does not log such values itself. Default: nothing is measured.

    Attributes:
        project: Name of the run.
        folder: Folder of the run; None if there is no run log.
        start_time: Start time of the run, in seconds since 1970.
        runlog: Writer of the run log. None on other ranks than 0, without a folder, or if it cannot be written.
        logged_run: Contents of the run log before this start; None if there were none.
        guarded_trackers: Trackers of this rank.

    Raises:
        TrackingError: If the folder contains a `log.jsonl` that is not a run log.
    """

    def __init__(
        self,
        project: str,
        folder: Path | None,
        choices: Sequence[Choice],
        is_main: bool,
        get_num_updates: Callable[[], int],
        measure: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        self.project = project
        self.folder = folder
        self._choices = choices
        self._get_num_updates = get_num_updates
        self._measure = measure
        self._last_norm: torch.Tensor | None = None
        self._pending_norm: tuple[int, Readback] | None = None  # step, and copy of the norm to the host
        self._script_metrics: set[str] = set()  # "norm" and "memory", if the script logs such values
        self._is_log_warned = False
        self.runlog: RunLog | None = None
        self.logged_run: LoggedRun | None = None
        self.guarded_trackers: list[GuardedTracker] = []
        self._identities: dict[str, dict[str, Any]] = {}  # by name of the tracker, from the run log
        self._config: dict[str, Any] = {}
        self._is_continuing = False  # whether trackers continue the run in the log
        self._is_run_decided = False  # whether it is known that this is right
        self._num_updates_at_start = 0
        self._reported_objects: set[str] = set()  # names of values that the run log cannot store
        self.start_time = time.time()
        if folder is not None and is_main:
            self._open_log(folder)

    def _open_log(self, folder: Path) -> None:
        """Open the run log, and read what it contains and with which identities trackers continue its run.

        If the log cannot be written, warn and leave `runlog` None.

        Raises:
            TrackingError: If the file is not a run log.
        """
        try:
            self.runlog = RunLog(folder)
        except OSError as error:
            log.warning("there is no log of this run: %s cannot be written (%s); training goes on", folder, error)
            return
        try:
            self.logged_run = read_run(folder)
        except TrackingError:
            return  # no process has written a complete line yet
        for event in self.logged_run.events:
            if event.name == "tracker":
                self._identities[str(event.details.get("tracker"))] = dict(event.details.get("identity") or {})

    # ---------------------------------------------------------------- start

    def start(
        self,
        config: dict[str, Any],
        init_kwargs: Mapping[str, Mapping[str, Any]],
        environment: Mapping[str, Any],
        is_continuing: bool,
        original_start: float | None = None,
    ) -> None:
        """Write the first line of the run log and start the trackers.

        Args:
            config: Configuration of the run, as JSON values.
            init_kwargs: Arguments for each tracker's class, by the tracker's name.
            environment: Keyword arguments of `RunLog.write_start`: "world_size", "device" and "versions".
            is_continuing: Whether the run is expected to continue the one in the existing run log.
            original_start: Original start time of the run in seconds since 1970, if this process ended the run earlier
                and now continues it. Default: None.
        """
        self._config = config
        self._num_updates_at_start = self._get_num_updates()
        if original_start is not None and (self.runlog is None or self.logged_run is not None):
            self.start_time = original_start
            self._is_run_decided = True
            is_continuing = True
            self._write_to_log("reopen")
        else:
            self._write_to_log("write_start", self.project, config, **environment)
        self._is_continuing = is_continuing and bool(self._identities)
        for choice in self._choices:
            guarded = GuardedTracker(choice.name, self.log_event)
            guarded.build(choice, init_kwargs.get(choice.name, {}))
            self.guarded_trackers.append(guarded)
            self._begin_tracker(guarded, self._is_continuing)
        restart_count = env.get_int("TORCHELASTIC_RESTART_COUNT") or 0
        was_killed = self.logged_run is not None and not self.logged_run.is_ended
        if original_start is None and (restart_count or was_killed):
            reason = env.get(env.RESTART_REASON) if restart_count else None
            details = {} if reason is None else {"reason": reason}
            self.log_event("restart", None, details | {"restart_count": restart_count})

    def _begin_tracker(self, guarded: GuardedTracker, is_continuing: bool) -> None:
        identity = self._identities.get(guarded.name) if is_continuing else None
        guarded.begin(TrackedRun(self.project, self.folder, identity))
        if self._config or guarded.takes != "given":
            guarded.call("store_init_configuration", self._config)
        if guarded.is_used:
            new_identity = guarded.read_identity()
            if new_identity != identity:
                self.log_event("tracker", None, {"tracker": guarded.name, "identity": new_identity})

    def _restart_trackers(self, is_continuing: bool) -> None:
        """Restart the trackers that can continue an earlier run.

        This is needed if the run was wrongly assumed to be new, or wrongly assumed to be continued.

        Args:
            is_continuing: Whether the trackers now continue the run in the log. Otherwise they start a new run.
        """
        self._is_continuing = is_continuing
        for guarded in self.guarded_trackers:
            if guarded.name in self._identities:
                guarded.call("finish")
                self._begin_tracker(guarded, is_continuing)

    def log_resume(self, step: int, details: Mapping[str, Any]) -> None:
        """Record that a checkpoint was loaded, and make trackers discard values that were logged for later steps.

        Args:
            step: Step of the checkpoint.
            details: Details of the event, as JSON values.
        """
        self.log_event("resumed", step, details)
        if not self._is_run_decided and not self._is_continuing:
            self._restart_trackers(True)
        self._is_run_decided = True
        self._call_trackers("rewind", step)
        self._replay_values(step)

    def _replay_values(self, step: int) -> None:
        """Log values from the run log again, in trackers that might have lost them when the last process was killed.

        Do nothing if the last process ended the run properly, or if the trackers do not continue its run.

        Args:
            step: Last step to log again.
        """
        logged_run = self.logged_run
        if logged_run is None or logged_run.is_ended or not self._is_continuing:
            return
        # Values that were logged in one call, by their time and step.
        rows: dict[tuple[float, int | None], dict[str, Value]] = {}
        for name, points in logged_run.values.items():
            for value_step, moment, value in points:
                if value_step is None or value_step <= step:
                    rows.setdefault((moment, value_step), {})[name] = value
        for guarded in self.guarded_trackers:
            buffered_seconds = 0.0 if guarded.tracker is None else guarded.tracker.holds_back
            for (moment, value_step), values in sorted(rows.items(), key=lambda row: row[0][0]):
                if moment > logged_run.last_time - buffered_seconds:
                    guarded.call("log", values, step=value_step)

    def _decide_which_run(self, step: int | None) -> None:
        """Decide whether the script continues the run in the log or starts a new one.

        Do nothing if this was decided before, for example when a checkpoint was loaded. Trackers are restarted if the
        run was wrongly assumed to be continued.

        Args:
            step: Step of the first logged value.
        """
        if self._is_run_decided:
            return
        self._is_run_decided = True
        if self.logged_run is None:
            return
        logged_steps = (
            logged_step
            for points in self.logged_run.values.values()
            for logged_step, _, _ in points
            if logged_step is not None
        )
        first_step = min(logged_steps, default=None)
        if self._num_updates_at_start:
            resumed_step = self._num_updates_at_start
        elif step is not None and first_step is not None and step > first_step:
            resumed_step = step - 1  # resumed by the script itself, as a new run would repeat the first step
        else:
            resumed_step = -1  # a new run: all values in the log are superseded
            if self._is_continuing:
                self._restart_trackers(False)
        self.log_event("started_over" if resumed_step < 0 else "resumed", resumed_step, {})
        self._call_trackers("rewind", resumed_step)
        if resumed_step >= 0:
            self._replay_values(resumed_step)

    # ---------------------------------------------------------------- logging

    def log(
        self,
        script_values: Mapping[str, Any],
        step: int,
        log_kwargs: Mapping[str, Mapping[str, Any]],
        script_step: int | None,
    ) -> None:
        """Log the values of one step to the run log, and to each tracker those that its attribute `takes` allows.

        If the run log cannot store a value because of its type, it contains the name and the type once. A warning
        follows if no tracker accepts such values.

        Args:
            script_values: Values by name, as the script passed them.
            step: Step of the run.
            log_kwargs: Additional keyword arguments for each tracker's method, by the tracker's name. A `step` in them
                replaces the step.
            script_step: Step that the script passed, or None. Trackers whose attribute `takes` is "given" get it instead
                of `step`.
        """
        self._decide_which_run(step)
        flat = flatten(script_values)
        numbers = {name: to_python(value) for name, value in flat.items() if is_loggable(value)}
        objects = {name: value for name, value in flat.items() if name not in numbers}
        if numbers or not flat:
            self._write_to_log("write_values", step, numbers)
            self._log_measurements(numbers, step)
        if new_names := objects.keys() - self._reported_objects:
            self._reported_objects |= new_names
            types = {name: describe_type(objects[name]) for name in sorted(new_names)}
            self.log_event("objects", step, {"kinds": types})
            self._warn_of_unstored_values(types)
        accepted_values = {
            "numbers": numbers,
            "objects": {name: numbers.get(name, value) for name, value in flat.items()},
            "given": script_values,
        }
        for guarded in self.guarded_trackers:
            values = accepted_values[guarded.takes]
            if values or not script_values:
                tracker_step = script_step if guarded.takes == "given" else step
                guarded.call("log", dict(values), **{"step": tracker_step} | dict(log_kwargs.get(guarded.name, {})))

    def _warn_of_unstored_values(self, types: Mapping[str, str]) -> None:
        """Warn about values that are not stored anywhere.

        Neither the run log nor any tracker accepts their types.

        Args:
            types: Descriptions of the types, by the values' names.
        """
        if any(guarded.takes != "numbers" and guarded.is_used for guarded in self.guarded_trackers):
            return
        log.warning(
            "log() keeps single numbers and texts only, and leaves out %s. Log value.item() of one element, a mean, or the "
            "elements by name; pictures go to log_images(), files to log_artifact()",
            ", ".join(f"{name!r}, {description}" for name, description in types.items()),
        )

    def _log_measurements(self, numbers: Mapping[str, Value], step: int) -> None:
        """Write the memory use, and the gradient norm of the last clipping, to the run log for the report.

        A value that the script logs itself is left out. A norm is read from the device only when the next values are
        logged, so that the host does not wait for it.

        Args:
            numbers: Values that the script logs in this step.
            step: Step of the run.
        """
        self._write_pending_norm()
        if self.runlog is None:
            return
        self._script_metrics |= {word for word in ("norm", "memory") for name in numbers if word in name}
        measured = self._measure()
        norm = measured.get("grad_norm")
        if type(norm) is torch.Tensor and norm is not self._last_norm and "norm" not in self._script_metrics:
            self._last_norm = norm
            self._pending_norm = (step, Readback(norm))
        if "memory" not in self._script_metrics and measured.get("memory") is not None:
            self._write_to_log("write_values", step, {f"{MEASURED}memory": measured["memory"]})

    def _write_pending_norm(self) -> None:
        pending, self._pending_norm = self._pending_norm, None
        if pending is not None:
            step, readback = pending
            self._write_to_log("write_values", step, {f"{MEASURED}grad_norm": readback.read().item()})

    def log_images(
        self, images: Mapping[str, Sequence[Picture]], step: int | None, log_kwargs: Mapping[str, Mapping[str, Any]]
    ) -> None:
        """Write the images of one step as files in the run's folder, and log them to the run log and the trackers.

        Args:
            images: Sequence of images for each name: uint8 arrays of shape [H, W, C].
            step: Step of the run.
            log_kwargs: Additional keyword arguments for each tracker's method, by the tracker's name.
        """
        self._decide_which_run(step)
        if self.runlog is not None:
            for name, suffix, image in number_images(images):
                path = self.runlog.folder / "images" / make_file_name(name, suffix, step)
                if self._try_to_write(partial(write_png, path, image)):
                    self._write_to_log("write_medium", "image", name + suffix, step, path)
        self._call_trackers("log_images", images, step=step, log_kwargs=log_kwargs)

    def log_artifact(
        self, path: Path, name: str, step: int | None, log_kwargs: Mapping[str, Mapping[str, Any]]
    ) -> None:
        """Log a file or folder that belongs to the run. The file or folder is neither moved nor copied.

        Args:
            path: Path of the file or folder.
            name: Name of the artifact.
            step: Step of the run.
            log_kwargs: Additional keyword arguments for each tracker's method, by the tracker's name.
        """
        self._decide_which_run(step)
        self._write_to_log("write_medium", "artifact", name, step, path)
        self._call_trackers("log_artifact", path, name, step=step, log_kwargs=log_kwargs)

    def log_event(self, name: str, step: int | None, details: Mapping[str, Any]) -> None:
        """Log a run event. Trackers get all events except those about trackers.

        After "checkpoint" and "preempted", the trackers are flushed.

        Args:
            name: Kind of event.
            step: Number of optimizer updates at which the event occurred; None for the current number.
            details: Details of the event, as JSON values.
        """
        event_step = self._get_num_updates() if step is None else step
        self._write_to_log("write_event", name, event_step, **details)
        if not name.startswith("tracker"):
            self._call_trackers("log_event", name, convert_to_json(details), step=event_step)
        if name in ("checkpoint", "preempted"):  # values logged before it must not be lost with the process
            self._call_trackers("flush")

    def _call_trackers(
        self, method: str, *args: Any, log_kwargs: Mapping[str, Mapping[str, Any]] | None = None, **kwargs: Any
    ) -> None:
        """Call a method of all trackers, with additional keyword arguments for those that `log_kwargs` names."""
        for guarded in self.guarded_trackers:
            guarded.call(method, *args, **kwargs | dict((log_kwargs or {}).get(guarded.name, {})))

    def _write_to_log(self, method: str, /, *args: Any, **kwargs: Any) -> None:
        """Call a method of the run log, if there is one. If it cannot be written, warn once."""
        if self.runlog is not None:
            self._try_to_write(partial(getattr(self.runlog, method), *args, **kwargs))

    def _try_to_write(self, write: Callable[[], Any]) -> bool:
        """Call `write`, and return whether it succeeded. Warn at the first failure only."""
        try:
            write()
        except (OSError, StateError) as error:
            if not self._is_log_warned:
                log.warning("the log of this run is not complete (%s); training goes on", error)
                self._is_log_warned = True
            return False
        return True

    # ---------------------------------------------------------------- end

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        """Write the last line of the run log, and finish the trackers one after the other.

        A warning names each tracker that takes longer than 15 s.

        Args:
            summary: Final values of the run, in addition to the number of updates and the duration. None for no others.
        """
        self._write_pending_norm()
        num_updates, seconds = self._get_num_updates(), round(time.time() - self.start_time, 3)
        final_values = {"num_updates": num_updates, "seconds": seconds} | dict(summary or {})
        self._write_to_log("write_end", final_values)
        self._call_trackers("log_event", "end", final_values, step=num_updates)
        for guarded in self.guarded_trackers:
            timer = threading.Timer(SLOW_FINISH, _warn_of_slow_end, (guarded.name,))
            timer.daemon = True
            timer.start()
            try:
                guarded.call("finish")
            finally:
                timer.cancel()
        if self.runlog is not None:
            self.runlog.close()


def flush_at_exit(feed: RunFeed) -> "weakref.finalize[[list[GuardedTracker]], RunFeed]":
    """Register and return a finalizer that flushes the trackers of `feed` if the process exits before `feed.finish()`.

    Detach the finalizer after `feed.finish()`.
    """
    return weakref.finalize(feed, _flush_trackers, feed.guarded_trackers)


def _flush_trackers(guarded_trackers: list[GuardedTracker]) -> None:
    for guarded in guarded_trackers:
        guarded.call("flush")


def _warn_of_slow_end(name: str) -> None:
    log.warning("training is over; the tracker %s is still finishing, and this process waits for it", name)
