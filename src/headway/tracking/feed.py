"""One run on one rank: its log, and the trackers that are fed from it.

Nothing that a tracker does wrong reaches the loop: a failure is warned about once and noted in the log, three in a row
end its part in the run. What it missed is in the log.

Which run is it? A process cannot know when it starts: it may resume or start over. The trackers go on with the run that
the log knows where a resume is to be expected, and are opened again where the guess was wrong::

    resumed, or a checkpoint waits to be resumed from       the same tracker runs
    the last start was killed, and nothing else is known    the same, until the first value says otherwise
    the last start ended                                    new ones, unless a resume follows

What may be logged stands by names joined with '/': numbers, 0-d tensors, numpy's scalars, text, and what only some trackers know.
"""

import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch

from headway.common import env
from headway.errors import StateError, TrackingError
from headway.log import get_logger
from headway.runtime.seed import untouched_rng_states
from headway.runtime.transfers import Readback
from headway.tracking.base import Choice, TrackedRun, Tracker
from headway.tracking.pictures import Picture, file_name, numbered, write_png
from headway.tracking.runlog import MEASURED, LoggedRun, RunLog, Value, leaves, plain, read_run


def flatten(values: Mapping[Any, object]) -> dict[str, Any]:
    """Nested mappings as one, names joined with '/'. Nothing is read from a device.

    Args:
        values: a None among them is left out: there was no such value this time.
    """
    return {name: each for name, each in leaves(values) if each is not None and not isinstance(each, Mapping)}


def is_loggable(value: object) -> bool:
    """Is it one number or a text?"""
    if isinstance(value, torch.Tensor):
        return value.ndim == 0 and not value.is_complex()
    if isinstance(value, numpy.ndarray | numpy.number):
        return value.ndim == 0 and not numpy.iscomplexobj(value)
    return isinstance(value, bool | int | float | str | numpy.bool_)


def to_python(value: object) -> Value:
    """The value as Python has it; a tensor on a device is waited for."""
    if isinstance(value, torch.Tensor | numpy.ndarray | numpy.generic):
        value = value.item()
    for kind in (bool, int, float, str):  # a subclass of theirs may know no other printing than its own
        if isinstance(value, kind):
            return kind(value)
    raise TrackingError(f"{describe(value)} cannot be logged")


def describe(value: object) -> str:
    """What kind of thing it is."""
    if isinstance(value, torch.Tensor | numpy.ndarray):
        kind = "a tensor" if isinstance(value, torch.Tensor) else "an array"
        return f"{kind} of shape {tuple(value.shape)} and type {value.dtype}"
    return f"{type(value).__module__}.{type(value).__qualname__}"


log = get_logger(__name__)

NUM_FAILURES = 3
SLOW_CALL = 1.0
SLOW_FINISH = 15.0


class GuardedTracker:
    """A tracker whose failures stay here.

    Args:
        name: the tracker's.
        report: a method that is told of failures: the name of an event, the step (None) and details.
    """

    def __init__(self, name: str, report: Callable[[str, int | None, Mapping[str, Any]], None]) -> None:
        self.name = name
        self.tracker: Tracker | None = None
        self.is_dropped = False
        self._report = weakref.WeakMethod(report)
        self._num_failures = 0
        self._is_warned = False

    def build(self, choice: Choice, init_kwargs: Mapping[str, Any]) -> None:
        """Make the tracker, or take the user's; where that fails it is dropped at once."""

        def make() -> None:
            self.tracker = choice if isinstance(choice, Tracker) else choice.make(**init_kwargs)

        self._try("__init__", make, is_fatal=True)

    @property
    def takes(self) -> str:
        """What its `log` is given."""
        return getattr(self.tracker, "takes", "numbers")

    def call(self, method: str, *args: Any, is_fatal: bool = False, **kwargs: Any) -> None:
        """Call one of its methods; a loop that has to wait for it is told once."""
        if self.tracker is None or self.is_dropped:
            return
        begun = time.monotonic()
        self._try(method, partial(getattr(self.tracker, method), *args, **kwargs), is_fatal)
        took = time.monotonic() - begun
        if took > SLOW_CALL and method.startswith("log"):
            log.warning_once("the tracker %s is slow, and training waits for it in %s()", self.name, method)

    def _try(self, method: str, act: Callable[[], Any], is_fatal: bool) -> None:
        # Beginnings and ends draw run names and the like; with each log() this would cost more than the log does.
        is_rare = not method.startswith("log") and method != "flush"
        try:
            with untouched_rng_states() if is_rare else nullcontext():
                act()
        except Exception as error:
            self._count_failure(method, error, is_fatal)
        else:
            self._num_failures = 0

    def _count_failure(self, method: str, error: Exception, is_fatal: bool) -> None:
        text = f"{type(error).__name__}: {error}"
        self._num_failures += 1
        self.is_dropped = is_fatal or self._num_failures >= NUM_FAILURES
        if not self._is_warned or self.is_dropped:
            fate = "is used no more" if self.is_dropped else "failed"
            said = self.name, fate, text[:1000], method
            log.warning("the tracker %s %s: %s in %s(); training goes on", *said, main_process_only=False)
            self._is_warned = True
            what = "tracker_dropped" if self.is_dropped else "tracker_failed"
            report = self._report()
            if report is not None:
                report(what, None, {"tracker": self.name, "call": method, "error": text[:1000]})


class RunFeed:
    """Everything of one run that is kept on this rank.

    Args:
        project: the run's name.
        folder: the run's; None: there is no log.
        choices: the trackers of this rank.
        is_main: rank 0 writes the log.
        position: the update that the loop is at.
        measure: gives "memory" in bytes and "grad_norm" (a tensor, or None), which the log has where the script logs none.

    Attributes:
        begun: when, in seconds since 1970.
    """

    def __init__(
        self,
        project: str,
        folder: Path | None,
        choices: Sequence[Choice],
        is_main: bool,
        position: Callable[[], int],
        measure: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        self.project, self.folder, self._choices, self._position = project, folder, choices, position
        self._measure = measure
        self._last_norm: torch.Tensor | None = None
        self._pending_norm: tuple[int, Readback] | None = None
        self._named: set[str] = set()
        self._is_log_warned = False
        self.runlog: RunLog | None = None
        self.before: LoggedRun | None = None
        self.guarded: list[GuardedTracker] = []
        self._identities: dict[str, dict[str, Any]] = {}
        self._config: dict[str, Any] = {}
        self._is_continuing = False
        self._is_settled = False
        self._num_at_start = 0
        self._odd: set[str] = set()
        self.begun = time.time()
        if folder is not None and is_main:
            self._open_log(folder)

    def _open_log(self, folder: Path) -> None:
        try:
            self.runlog = RunLog(folder)
        except OSError as error:
            log.warning("there is no log of this run: %s cannot be written (%s); training goes on", folder, error)
            return
        try:
            self.before = read_run(folder)
        except TrackingError:
            self.before = None  # no process has begun a line yet
        for event in self.before.events if self.before is not None else ():
            if event.name == "tracker":
                self._identities[str(event.details.get("tracker"))] = dict(event.details.get("identity") or {})

    # ---------------------------------------------------------------- begin

    def start(
        self,
        config: dict[str, Any],
        init_kwargs: Mapping[str, Mapping[str, Any]],
        about: Mapping[str, Any],
        is_continuing: bool,
        since: float | None = None,
    ) -> None:
        """Write the first line and begin the trackers.

        Args:
            config: JSON values.
            init_kwargs: for each tracker's class, by its name.
            about: world_size, device and versions.
            is_continuing: is it the run that the log knows, as far as one can tell now?
            since: this process has ended the run before, and goes on with it; when it had begun it. None: it has not.
        """
        self._config, self._num_at_start = config, self._position()
        if since is not None and (self.runlog is None or self.before is not None):
            self.begun, self._is_settled, is_continuing = since, True, True
            self._write("reopen")
        else:
            self._write("run", self.project, config, **about)
        self._is_continuing = is_continuing and bool(self._identities)
        for choice in self._choices:
            guarded = GuardedTracker(choice.name, self.event)
            guarded.build(choice, init_kwargs.get(choice.name, {}))
            self.guarded.append(guarded)
            self._begin_tracker(guarded, self._is_continuing)
        restarts = env.get_int("TORCHELASTIC_RESTART_COUNT") or 0
        if since is None and (restarts or (self.before is not None and not self.before.is_ended)):
            self.event("restart", None, {"restart_count": restarts})

    def _begin_tracker(self, guarded: GuardedTracker, is_continuing: bool) -> None:
        identity = self._identities.get(guarded.name) if is_continuing else None
        guarded.call("begin", TrackedRun(self.project, self.folder, identity), is_fatal=True)
        if self._config or guarded.takes != "given":
            guarded.call("store_init_configuration", self._config)
        if guarded.tracker is not None and not guarded.is_dropped and guarded.tracker.identity != identity:
            self.event("tracker", None, {"tracker": guarded.name, "identity": guarded.tracker.identity})

    def _restart_trackers(self, is_continuing: bool) -> None:
        """The guess was wrong: those to whom it matters begin once more."""
        self._is_continuing = is_continuing
        for guarded in self.guarded:
            if guarded.name in self._identities:
                guarded.call("finish")
                self._begin_tracker(guarded, is_continuing)

    def resumed(self, step: int, details: Mapping[str, Any]) -> None:
        """A checkpoint was taken up: what was logged for later steps is superseded."""
        self.event("resumed", step, details)
        if not self._is_settled and not self._is_continuing:
            self._restart_trackers(True)
        self._is_settled = True
        self._call_trackers("rewind", step)
        self._replay_values(step)

    def _replay_values(self, step: int) -> None:
        """Give trackers that hold values back what may have died with the process before this one, up to `step`."""
        before = self.before
        if before is None or before.is_ended or not self._is_continuing:
            return
        rows: dict[tuple[float, int | None], dict[str, Value]] = {}
        for name, points in before.values.items():
            for at, moment, value in points:
                if at is None or at <= step:
                    rows.setdefault((moment, at), {})[name] = value
        for guarded in self.guarded:
            since = before.last_time - (0.0 if guarded.tracker is None else guarded.tracker.holds_back)
            for (moment, at), values in sorted(rows.items(), key=lambda row: row[0][0]):
                if moment > since:
                    guarded.call("log", values, step=at)

    def _decide_which_run(self, step: int | None) -> None:
        """The first value comes, and no checkpoint was taken up."""
        if self._is_settled:
            return
        self._is_settled = True
        before = self.before
        if before is None:
            return
        steps = (at for points in before.values.values() for at, _, _ in points if at is not None)
        first = min(steps, default=None)
        if self._num_at_start:
            last = self._num_at_start
        elif step is not None and first is not None and step > first:
            last = step - 1  # resumed by the script's own means: a run from the start repeats the first step
        else:
            last = -1
            if self._is_continuing:
                self._restart_trackers(False)
        self.event("started_over" if last < 0 else "resumed", last, {})
        self._call_trackers("rewind", last)
        if last >= 0:
            self._replay_values(last)

    # ---------------------------------------------------------------- what is logged

    def log(
        self, given: Mapping[str, Any], step: int, log_kwargs: Mapping[str, Mapping[str, Any]], said: int | None
    ) -> None:
        """Values of one step, to the log and to every tracker; the kind of what the log cannot hold is noted once.

        Args:
            given: names to values.
            step: of the run.
            log_kwargs: more for trackers, by their names.
            said: the step that the script named, which trackers get that take all as it was given.
        """
        self._decide_which_run(step)
        flat = flatten(given)
        known = {name: to_python(value) for name, value in flat.items() if is_loggable(value)}
        odd = {name: describe(value) for name, value in flat.items() if name not in known}
        if known or not flat:
            self._write("values", step, known)
            self._log_measured(known, step)
        if new := odd.keys() - self._odd:
            self._odd |= new
            self.event("objects", step, {"kinds": {name: odd[name] for name in sorted(new)}})
        by_kind = {"numbers": known, "objects": {name: known.get(name, flat[name]) for name in flat}, "given": given}
        for guarded in self.guarded:
            values = by_kind[guarded.takes]
            if values or not given:
                known_step = said if guarded.takes == "given" else step
                guarded.call("log", dict(values), step=known_step, **log_kwargs.get(guarded.name, {}))

    def _log_measured(self, known: Mapping[str, Value], step: int) -> None:
        """Memory, and the norm of the last clipping, for the report; a norm is read with the next values, without waiting."""
        self._write_norm()
        if self.runlog is None:
            return
        self._named |= {word for word in ("norm", "memory") for name in known if word in name}
        measured = self._measure()
        norm = measured.get("grad_norm")
        if type(norm) is torch.Tensor and norm is not self._last_norm and "norm" not in self._named:
            self._last_norm, self._pending_norm = norm, (step, Readback(norm))
        if "memory" not in self._named and measured.get("memory") is not None:
            self._write("values", step, {f"{MEASURED}memory": measured["memory"]})

    def _write_norm(self) -> None:
        pending, self._pending_norm = self._pending_norm, None
        if pending is not None:
            self._write("values", pending[0], {f"{MEASURED}grad_norm": pending[1].read().item()})

    def log_images(
        self, images: Mapping[str, Sequence[Picture]], step: int | None, log_kwargs: Mapping[str, Mapping[str, Any]]
    ) -> None:
        """Images of one step; their files stand in the run's folder."""
        self._decide_which_run(step)
        if self.runlog is not None:
            for name, part, image in numbered(images):
                path = self.runlog.folder / "images" / file_name(name, part, step)
                if self._try_to_write(partial(write_png, path, image)):
                    self._write("medium", "image", name + part, step, path)
        self._call_trackers("log_images", images, step=step, by_name=log_kwargs)

    def log_artifact(
        self, path: Path, name: str, step: int | None, log_kwargs: Mapping[str, Mapping[str, Any]]
    ) -> None:
        """A file or folder that belongs to the run; it stays where it is."""
        self._decide_which_run(step)
        self._write("medium", "artifact", name, step, path)
        self._call_trackers("log_artifact", path, name, step=step, by_name=log_kwargs)

    def event(self, name: str, step: int | None, details: Mapping[str, Any]) -> None:
        """Something happened; trackers are told of what is not about themselves."""
        step = self._position() if step is None else step
        self._write("event", name, step, **details)
        if not name.startswith("tracker"):
            self._call_trackers("log_event", name, plain(details), step=step)
        if name in ("checkpoint", "preempted"):  # what comes before it must not be lost with the process
            self._call_trackers("flush")

    def _call_trackers(
        self, method: str, *args: Any, by_name: Mapping[str, Mapping[str, Any]] | None = None, **kwargs: Any
    ) -> None:
        for guarded in self.guarded:
            guarded.call(method, *args, **kwargs, **(by_name or {}).get(guarded.name, {}))

    def _write(self, line: str, *args: Any, **kwargs: Any) -> None:
        if self.runlog is not None:
            self._try_to_write(partial(getattr(self.runlog, line), *args, **kwargs))

    def _try_to_write(self, act: Callable[[], Any]) -> bool:
        try:
            act()
        except (OSError, StateError) as error:
            if not self._is_log_warned:
                log.warning("the log of this run is not complete (%s); training goes on", error)
                self._is_log_warned = True
            return False
        return True

    # ---------------------------------------------------------------- end

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        """Write the last line, and end the trackers, one after the other; who takes long is named."""
        self._write_norm()
        told = {"num_updates": self._position(), "seconds": round(time.time() - self.begun, 3)} | dict(summary or {})
        self._write("end", told)
        self._call_trackers("log_event", "end", told, step=self._position())
        for guarded in self.guarded:
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
    """Let trackers write what they hold where the process ends without `finish`; detach it after that."""
    return weakref.finalize(feed, _flush_trackers, feed.guarded)


def _flush_trackers(several: list[GuardedTracker]) -> None:
    for guarded in several:
        guarded.call("flush")


def _warn_of_slow_end(name: str) -> None:
    log.warning("training is over; the tracker %s is still finishing, and this process waits for it", name)
