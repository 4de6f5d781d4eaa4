"""Where to stop: ranks that are asked to end, by a signal to any of them, agree on one point that all of them reach.

A rank passes checks (e.g. before each batch), which cost it a comparison. Its position is (windows begun, checks since).
When somebody asks, a thread of each rank, which runs while the rank waits in a collective, posts the next position::

    rank 0   check (7, 0) ... (7, 1) ...                    stops at the first check from (7, 2) on
    rank 1   check (7, 0) ... waits in a collective (7, 1) ...                    and so does this one
    threads                       ^ asked: post (7, 2) and (7, 1); the largest is the point to stop at

Nobody passes its own post before all posts are there, so nobody is beyond the largest, and until then every rank does what
the others wait for. At that check (the next one without an open window, where windows are short) ranks compare where they
are: one that is elsewhere, or does not come (a loop that only it runs), makes all go on to the next window.

A window that turns out to be long is not waited for: where nobody has stopped after a while, the threads post once more, and the
point may then lie in an open window.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from headway.common import scope
from headway.errors import ControlPlaneError
from headway.log import get_logger
from headway.runtime import heartbeat, process, pulse
from headway.runtime.control_plane.attendance import Attendance
from headway.runtime.control_plane.control import Control, current
from headway.runtime.control_plane.store import first_line, named
from headway.runtime.ending import SignalFlags

LOOK = 0.2
"""Seconds between looks for what another rank has heard."""

POSTING = 30.0
"""Seconds for all ranks' threads to post; one that does not is dead or stopped."""

LATE = 20.0
"""Seconds that a rank may come later to the agreed check than another; twice as many in the next round, and so on."""

SOON = 5.0
"""Seconds that an update may take to be finished first, so that nothing is computed twice; a longer one is broken off.

So is one that took less until now, and has not come to its end so long after the request.
"""

AGAIN = 3.0
"""Seconds after which a signal that comes again is meant: it ends the process, where it has not come to a check yet."""

Position = tuple[int, int]

log = get_logger(__name__)


class StopAgreement:
    """One process's part in the agreement.

    Args:
        control: the way to the other ranks.
        signals: those that ask to stop.
        end: when to stop without being asked, in seconds since the epoch; None: never.
        name: tells one agreement of a run from the next.

    Attributes:
        reason: who asked and how; empty where nobody has.
        is_agreed: all ranks have come to the check at which they stop.
    """

    def __init__(self, control: Control, signals: Sequence[int], end: float | None, name: str) -> None:
        self.reason = ""
        self.is_agreed = False
        self._control = control
        self._flags = SignalFlags(signals)
        self._end = end
        self._name = name
        self._position: Position = (0, -1)
        self._target: Position | None = None
        self._is_in_a_hurry = False
        self._is_arriving = False
        self._asked_at = 0.0
        self._has_posted_again = False
        self._round = 0
        self._began = time.monotonic()
        self._paces = (0.0, 0.0)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headway-stopping", daemon=True)

    def start(self) -> None:
        """Begin to listen; in the main thread.

        Raises:
            StateError: elsewhere.
        """
        self._flags.start()
        pulse.own().set_saves_on_signal(True)
        heartbeat.before_shutdown(self._end_thread)
        self._thread.start()

    def stop(self) -> None:
        """Listen no more."""
        self._end_thread()
        pulse.own().set_saves_on_signal(False)
        if threading.current_thread() is threading.main_thread():  # no other may take handlers off
            self._flags.stop(then_ignore=self.is_agreed)

    def _end_thread(self) -> None:
        self._over.set()
        self._flags.heard.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(5)

    # ---------------------------------------------------------------- the main thread

    def check(self, window: int, where: Callable[[], tuple[str, bool]]) -> bool:
        """Pass a check; True: all ranks are at this one, and stop here.

        Args:
            window: windows begun so far.
            where: says where this rank is, in words that are the same on a rank at the same place; and whether a window is
                open here.
        """
        was = self._position
        if was[0] != window:
            now = time.monotonic()
            self._began, self._paces = now, (self._paces[1], now - self._began)
        # Written before the reason is read, as the thread does it the other way round: one of the two sees the other.
        self._position = position = (window, was[1] + 1 if was[0] == window else 0)
        if not self.reason or self.is_agreed:
            return False
        return self._decide(position, *where())

    def _decide(self, position: Position, where: str, is_open: bool) -> bool:
        if self._target is None:
            self._target, pace = self._agree_on_target("post")
            self._is_in_a_hurry = pace > SOON
        self._hurry()
        while position >= self._target and (self._is_in_a_hurry or not is_open):
            # Written before it is read whether the thread has posted again, as the thread does it the other way round.
            self._is_arriving = True
            if self._hurry():
                self._is_arriving = False
                continue
            is_here = self._arrive(where)
            self._is_arriving = False
            if is_here:
                self._see_off()
                self.is_agreed = True
                return True
            self._target = (self._target[0] + 1, 0)
            self._round += 1
        return False

    def _hurry(self) -> bool:
        """Where the threads have posted again: the nearest check, in a window or not; True if that is news."""
        if self._is_in_a_hurry or not self._has_posted_again:
            return False
        self._target, _ = self._agree_on_target("again")
        self._is_in_a_hurry = True
        return True

    def _agree_on_target(self, name: str) -> tuple[Position, float]:
        """The check to stop at, the furthest of those posted under that name, and the seconds that a window takes."""
        keys = [self._key(f"{name}/{rank}") for rank in range(self._control.world_size)]
        deadline = time.monotonic() + POSTING
        while missing := [rank for rank, key in enumerate(keys) if not self._control.has(key)]:
            if time.monotonic() > deadline:
                raise ControlPlaneError(
                    f"this run is asked to stop ({self.reason}), but {named(missing)} has not answered for {POSTING:g} s: it is "
                    "dead or stopped. Nothing is saved now; go on from the last checkpoint"
                )
            time.sleep(0.005)
        posts = [self._control.get(key, timedelta(seconds=POSTING)).decode().split() for key in keys]
        target = max((int(window), int(checks)) for window, checks, _ in posts)
        return target, max(float(pace) for _, _, pace in posts)

    def _arrive(self, where: str) -> bool:
        """Are all ranks here? The one that comes last says so, or the one that has waited for too long."""
        control, verdict = self._control, self._key(f"{self._round}/verdict")
        # Another rank may wait for this one in a save that it makes alone.
        process.current().scope.own(Attendance).count_call("stopping")
        control.set(self._key(f"{self._round}/{control.rank}"), where.encode())
        if control.count(self._key(f"{self._round}/count")) == control.world_size:
            keys = [self._key(f"{self._round}/{rank}") for rank in range(control.world_size)]
            told = {control.get(key, timedelta(seconds=POSTING)) for key in keys}
            return control.set_once(verdict, b"here" if len(told) == 1 else b"on") == b"here"
        deadline = time.monotonic() + LATE * 2**self._round
        while not control.has(verdict):
            if time.monotonic() > deadline:
                return control.set_once(verdict, b"on") == b"here"
            time.sleep(0.005)
        return control.set_once(verdict, b"on") == b"here"

    def _see_off(self) -> None:
        """Rank 0 may be the store's host, and its script may end here: it goes on when all the others have read the verdict."""
        control, known = self._control, self._key("known")
        if control.count(self._key("read")) == control.world_size:
            control.set(known, b"1")
        deadline = time.monotonic() + POSTING
        while control.rank == 0 and not control.has(known) and time.monotonic() < deadline:
            time.sleep(0.005)

    def _key(self, name: str) -> str:
        return f"stopping/{self._name}/{name}"

    # ---------------------------------------------------------------- the thread

    def _run(self) -> None:
        try:
            while not self._over.is_set():
                self._flags.heard.wait(LOOK)
                self._flags.heard.clear()
                if self.reason:
                    self._look_again()
                else:
                    self._look()
        except (ControlPlaneError, RuntimeError) as error:  # torch's DistError among them: its host is gone
            if not self._over.is_set():
                log.info("signals are heard no more, as the control plane is gone: %s", first_line(error))

    def _look(self) -> None:
        said = self._hear()
        if said and pulse.own().is_told_to_end and not self._flags.has_former:
            os._exit(128 + signal.SIGTERM)  # as it would without this: another rank has failed, and the report is made
        asked = self._key("asked")
        if said:
            reason = self._control.set_once(asked, said.encode())
        elif self._control.world_size > 1 and self._control.has(asked):
            reason = self._control.get(asked, timedelta(seconds=POSTING))
        else:
            return
        self._asked_at = time.monotonic()
        self.reason = reason.decode()
        self._post("post")

    def _post(self, name: str, *, is_at_check: bool = False) -> None:
        window, checks = self._position
        # The quicker of two, as an evaluation may have come between windows.
        post = f"{window} {checks if is_at_check else checks + 1} {min(self._paces)}"
        self._control.set(self._key(f"{name}/{self._control.rank}"), post.encode())

    def _look_again(self) -> None:
        """Nobody is to wait for a window that does not end, or be made to kill a process that has no check left to come to."""
        is_late = time.monotonic() - self._asked_at > SOON
        if not (self._has_posted_again or self.is_agreed) and (is_late or self._control.has(self._key("hurry"))):
            self._control.set_once(self._key("hurry"), b"1")
            self._has_posted_again = True
            self._post("again", is_at_check=self._is_arriving)
        first, last = self._flags.times or (0.0, 0.0)
        if last - first > AGAIN and not self.is_agreed and not self._flags.has_former:
            os._exit(128 + (self._flags.first or signal.SIGTERM))

    def _hear(self) -> str:
        """What has come to this rank itself; empty for nothing."""
        who = f" on rank {self._control.rank}" if self._control.world_size > 1 else ""
        if (number := self._flags.first) is not None:
            return f"{signal.Signals(number).name}{who}"
        if self._end is not None and time.time() >= self._end:
            return "the end of the allotted time"
        return ""


class _Agreements:
    """Those of this process, one after the other.

    Attributes:
        current: the one that listens; None before the first.
        num_started: how many there have been: ranks begin them alike, so it names each.
    """

    def __init__(self) -> None:
        self.current: StopAgreement | None = None
        self.num_started = 0


def start(signals: Sequence[int], end: float | None) -> StopAgreement:
    """Listen from now on, in place of who did before in this process; until the process's runtime ends.

    Args:
        signals: those that ask to stop.
        end: when to stop without being asked, in seconds since the epoch; None: never.

    Raises:
        StateError: called outside the main thread.
    """
    own = scope.own(_Agreements)
    if own.current is not None:
        own.current.stop()
        own.current = None
    stopping = StopAgreement(current(), signals, end, str(own.num_started))
    own.num_started += 1
    stopping.start()
    own.current = stopping
    process.at_end(stopping.stop)
    return stopping
