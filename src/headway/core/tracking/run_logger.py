"""Logger of one run on one rank: write values and events to the run log, and send them to trackers.

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
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from headway.common import env
from headway.core.tracking.base import TrackedRun
from headway.core.tracking.guarded import SLOW_FINISH_SECONDS, GuardedTracker
from headway.core.tracking.measurements import MeasuredValue, Measurements
from headway.core.tracking.pictures import ImageFileNames, Picture, number_images, write_png
from headway.core.tracking.runlog import MEASURED, RunLog, convert_to_json
from headway.core.tracking.runlog_reader import LoggedRun, read_run
from headway.core.tracking.selection import Choice
from headway.core.tracking.values import describe_type, flatten, is_loggable, to_python
from headway.errors import StateError, TrackingError
from headway.log import get_logger

log = get_logger(__name__)


class RunLogger:
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
        self._measurements = Measurements(measure)
        self._is_log_warned = False  # whether a failed write to the run log was logged
        self.runlog: RunLog | None = None
        self.logged_run: LoggedRun | None = None
        self.guarded_trackers: list[GuardedTracker] = []
        self._identities: dict[str, dict[str, Any]] = {}  # by name of the tracker, from the run log
        self._config: dict[str, Any] = {}  # JSON values, from `start`
        self._is_continuing = False  # whether trackers continue the run in the log; a guess until the run is decided
        self._is_run_decided = False  # whether it is known that the script continues that run, or starts a new one
        self._num_updates_at_start = 0  # number of optimizer updates when `start` was called
        self._reported_objects: set[str] = set()  # names of values that the run log cannot store
        self._image_file_names = ImageFileNames()
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
            log.warning("there is no log of this run: %s cannot be written (%s); training continues", folder, error)
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
            self._write_to_log(RunLog.reopen)
        else:
            self._write_to_log(lambda runlog: runlog.write_start(self.project, config, **environment))
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
        """Start a run in one tracker, send it the configuration, and log its identity so that a resumed run can continue it.

        Args:
            guarded: Tracker.
            is_continuing: Whether this run continues the earlier run in the tracker.
        """
        identity = self._identities.get(guarded.name) if is_continuing else None
        guarded.begin(TrackedRun(self.project, self.folder, identity))
        if self._config or guarded.accepted_kind != "given":
            guarded.store_init_configuration(self._config)
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
                guarded.finish()
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
        self._rewind_trackers(step)
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
        calls = logged_run.list_log_calls(step)
        for guarded in self.guarded_trackers:
            buffered_seconds = 0.0 if guarded.tracker is None else guarded.tracker.holds_back
            first_lost_time = logged_run.last_time - buffered_seconds
            for call in calls:
                if call.time > first_lost_time:
                    guarded.log(call.values, step=call.step)

    def _decide_which_run(self, step: int | None) -> None:
        """Decide whether the script continues the run in the log or starts a new one.

        Do nothing if this was decided before, for example when a checkpoint was loaded. Trackers are restarted if the
        run was wrongly assumed to be continued.

        Args:
            step: Step that the script gave for the first logged value, or None if it gave none.
        """
        if self._is_run_decided:
            return
        self._is_run_decided = True
        if self.logged_run is None:
            return
        first_step = self.logged_run.find_first_step()
        if self._num_updates_at_start:
            resumed_step = self._num_updates_at_start
        elif step is not None and first_step is not None and step > first_step:
            resumed_step = step - 1  # resumed by the script itself, as a new run would repeat the first step
        else:
            self._start_over()
            return
        self.log_event("resumed", resumed_step, {})
        self._rewind_trackers(resumed_step)
        self._replay_values(resumed_step)

    def _start_over(self) -> None:
        """Record that the script starts a new run, so that all values in the log are superseded."""
        if self._is_continuing:
            self._restart_trackers(False)
        self.log_event("started_over", -1, {})
        self._rewind_trackers(-1)

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
            self._write_to_log(lambda runlog: runlog.write_values(step, numbers))
            if self.runlog is not None:
                self._write_measured_values(self._measurements.measure(step, numbers))
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
            values = accepted_values[guarded.accepted_kind]
            if values or not script_values:
                tracker_step = script_step if guarded.accepted_kind == "given" else step
                guarded.log(dict(values), **{"step": tracker_step} | dict(log_kwargs.get(guarded.name, {})))

    def _warn_of_unstored_values(self, types: Mapping[str, str]) -> None:
        """Warn about values that are not stored anywhere.

        Neither the run log nor any tracker accepts their types.

        Args:
            types: Descriptions of the types, by the values' names.
        """
        if any(guarded.accepted_kind != "numbers" and guarded.is_used for guarded in self.guarded_trackers):
            return
        log.warning(
            "log() keeps single numbers and texts only, and leaves out %s. Log value.item() of one element, a mean, or the "
            "elements by name; pictures go to log_images(), files to log_artifact()",
            ", ".join(f"{name!r}, {description}" for name, description in types.items()),
        )

    def _write_measured_values(self, values: Iterable[MeasuredValue]) -> None:
        """Write values that the library has measured to the run log, under names that begin with "headway/"."""
        for each in values:
            self._write_to_log(
                partial(RunLog.write_values, step=each.step, values={f"{MEASURED}{each.name}": each.value})
            )

    def log_images(
        self, images: Mapping[str, Sequence[Picture]], step: int, log_kwargs: Mapping[str, Mapping[str, Any]]
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
                path = self.runlog.folder / "images" / self._image_file_names.choose(name, suffix, step)
                if self._try_to_write(partial(write_png, path, image)):
                    self._write_to_log(
                        partial(RunLog.write_medium, kind="image", name=name + suffix, step=step, file=path)
                    )
        for guarded in self.guarded_trackers:
            guarded.log_images(images, **{"step": step} | dict(log_kwargs.get(guarded.name, {})))

    def log_artifact(self, path: Path, name: str, step: int, log_kwargs: Mapping[str, Mapping[str, Any]]) -> None:
        """Log a file or folder that belongs to the run. The file or folder is neither moved nor copied.

        Args:
            path: Path of the file or folder.
            name: Name of the artifact.
            step: Step of the run.
            log_kwargs: Additional keyword arguments for each tracker's method, by the tracker's name.
        """
        self._decide_which_run(step)
        self._write_to_log(lambda runlog: runlog.write_medium("artifact", name, step, path))
        for guarded in self.guarded_trackers:
            guarded.log_artifact(path, name, **{"step": step} | dict(log_kwargs.get(guarded.name, {})))

    def log_event(self, name: str, step: int | None, details: Mapping[str, Any]) -> None:
        """Log a run event. Trackers get all events except those about trackers.

        After "checkpoint" and "preempted", the trackers are flushed.

        Args:
            name: Kind of event.
            step: Number of optimizer updates at which the event occurred; None for the current number.
            details: Details of the event, as JSON values.
        """
        event_step = self._get_num_updates() if step is None else step
        self._write_to_log(lambda runlog: runlog.write_event(name, event_step, **details))
        if not name.startswith("tracker"):
            json_details = convert_to_json(details)
            for guarded in self.guarded_trackers:
                guarded.log_event(name, json_details, event_step)
        if name in ("checkpoint", "preempted"):  # values logged before it must not be lost with the process
            _flush_trackers(self.guarded_trackers)

    def _rewind_trackers(self, step: int) -> None:
        """Make all trackers discard values that were logged for later steps."""
        for guarded in self.guarded_trackers:
            guarded.rewind(step)

    def _write_to_log(self, write: Callable[[RunLog], object]) -> None:
        """Call a function that writes to the run log, if there is one. If it cannot be written, warn once.

        Args:
            write: Function that gets the run log.
        """
        if self.runlog is not None:
            self._try_to_write(partial(write, self.runlog))

    def _try_to_write(self, write: Callable[[], Any]) -> bool:
        """Call `write`, and return whether it succeeded. Warn at the first failure only."""
        try:
            write()
        except (OSError, StateError) as error:
            if not self._is_log_warned:
                log.warning("the log of this run is not complete (%s); training continues", error)
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
        self._write_measured_values(self._measurements.finish())
        num_updates, seconds = self._get_num_updates(), round(time.time() - self.start_time, 3)
        final_values = {"num_updates": num_updates, "seconds": seconds} | dict(summary or {})
        self._write_to_log(lambda runlog: runlog.write_end(final_values))
        for guarded in self.guarded_trackers:
            guarded.log_event("end", final_values, num_updates)
        for guarded in self.guarded_trackers:
            timer = threading.Timer(SLOW_FINISH_SECONDS, _warn_of_slow_end, (guarded.name,))
            timer.daemon = True
            timer.start()
            try:
                guarded.finish()
            finally:
                timer.cancel()
        if self.runlog is not None:
            self.runlog.close()


def flush_at_exit(run_logger: RunLogger) -> "weakref.finalize[[list[GuardedTracker]], RunLogger]":
    """Register and return a finalizer that flushes the trackers of `run_logger` if the process exits before `run_logger.finish()`.

    Detach the finalizer after `run_logger.finish()`.
    """
    return weakref.finalize(run_logger, _flush_trackers, run_logger.guarded_trackers)


def _flush_trackers(guarded_trackers: list[GuardedTracker]) -> None:
    """Flush the trackers. This is not a method of `RunLogger`, because the finalizer would then keep that object alive."""
    for guarded in guarded_trackers:
        guarded.flush()


def _warn_of_slow_end(name: str) -> None:
    """Warn that a tracker needs long to finish, for example because it uploads files."""
    log.warning("training is over; the tracker %s is still finishing, and this process waits for it", name)
