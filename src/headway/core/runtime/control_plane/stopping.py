"""Coordinated stop: after a stop request on any rank, all ranks agree on one check at which all of them stop.

A check is a call of `StopAgreement.check`, for example before each batch. It is cheap while no stop is requested. A
rank's position is the pair (accumulation windows started, checks since the last window started). After a request, a
thread of each rank posts the position of the rank's next check. The thread runs even while the rank waits in a
collective::

    rank 0   check (7, 0) ... (7, 1) ...                       check (7, 2): stop
    rank 1   check (7, 0) ... waits in a collective (7, 1) ... check (7, 2): stop
    threads                       ^ request: post (7, 2) and (7, 1); the larger one is the target

No rank passes the position that it has posted until all posts have arrived. So no rank is beyond the largest posted
position, which is the target. Every rank continues to the target, because other ranks might wait for it in a
collective. There the ranks compare their places in the script. If accumulation windows are short, they first continue
until no window is open. If a rank is elsewhere or does not arrive (for example because only one rank runs a loop with
checks), all ranks continue to the next window and compare again.

If a window is long, the stop does not wait for its end. If no rank has stopped after a while, the threads post once
more, and the agreed check can then be inside an open window.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import NamedTuple

from headway.common import scope
from headway.core.config.preemption import Deadline
from headway.core.runtime import heartbeat, heartbeat_file, process
from headway.core.runtime.control_plane.attendance import Attendance
from headway.core.runtime.control_plane.control import Control, current
from headway.core.runtime.control_plane.roll_call import name_ranks
from headway.core.runtime.control_plane.store import get_first_line
from headway.core.runtime.signals import SignalFlags
from headway.errors import ControlPlaneError
from headway.log import get_logger

POLL_INTERVAL = 0.2
"""Seconds between two checks for stop requests of other ranks."""

ANSWER_TIMEOUT = 30.0
"""Seconds within which the threads of all ranks must post their positions after a stop request.

A rank that does not do so is dead or suspended.
"""

ARRIVAL_TIMEOUT = 20.0
"""Seconds that a rank waits at the check at which it wants to stop until all other ranks arrive there.

The limit doubles with each further check at which the ranks try to stop.
"""

MAX_FINISHED_SECONDS = 5.0
"""Longest duration, in seconds, of an update that is still finished before the stop, so that its work is not lost.

A longer update is interrupted. So is one that is unfinished this many seconds after the request, even if earlier
updates were shorter.
"""

MIN_REPEAT_SECONDS = 3.0
"""Minimum seconds between the first signal and a repeated signal that ends the process.

A repeated signal does not end the process if all ranks have already reached the check at which they stop.
"""


class CheckPosition(NamedTuple):
    """Position of a check in a rank's script.

    Attributes:
        window: Number of accumulation windows started before the check.
        check: Number of checks since that window started, from 0.
    """

    window: int
    check: int


log = get_logger(__name__)


class StopAgreement:
    """Agreement between all ranks to stop the run at one point of their scripts, as seen from this rank.

    The script calls `check` regularly. After a stop request on any rank, the ranks agree on one of these checks.

    Args:
        control: Control plane client.
        signals: Signals that request a stop.
        deadline: Time at which to stop the run even without a signal; None for no time limit.
        name: Unique name of this agreement within the run.

    Attributes:
        reason: Text that names the source of the stop request, such as a signal and its rank; empty without a request.
        is_agreed: Whether all ranks have reached the check at which they stop.
    """

    def __init__(self, control: Control, signals: Sequence[int], deadline: Deadline | None, name: str) -> None:
        self.reason = ""
        self.is_agreed = False
        self._control = control
        self._flags = SignalFlags(signals)
        self._deadline = deadline
        self._name = name
        # Written by the main thread, and read by this object's thread.
        self._position = CheckPosition(0, -1)  # of the latest check
        self._is_at_target = False  # whether the main thread is in a check at which it wants to stop
        # Written by this object's thread.
        self._request_time = 0.0  # time of the stop request in seconds on the monotonic clock
        self._has_posted_again = False  # whether positions were posted a second time, because no rank has stopped
        # Used by the main thread only.
        self._target: CheckPosition | None = None  # check at which to stop; None before the ranks have agreed
        self._can_stop_in_window = False  # whether to stop even if an accumulation window is open
        self._attempt = 0  # number of checks at which the ranks tried to stop, and did not
        self._window_start = time.monotonic()
        self._window_seconds = (0.0, 0.0)  # durations of the last two accumulation windows, the older one first
        self._is_ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headway-stopping", daemon=True)

    def start(self) -> None:
        """Install the signal handlers, and start the thread that exchanges stop requests with the other ranks.

        Raises:
            StateError: If called outside the main thread.
        """
        self._flags.start()
        heartbeat_file.get_own_file().set_saves_on_signal(True)
        heartbeat.stop_before_shutdown(self._end_thread)
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread and restore the signal handlers. Outside the main thread, the handlers stay installed."""
        self._end_thread()
        heartbeat_file.get_own_file().set_saves_on_signal(False)
        if threading.current_thread() is threading.main_thread():  # only the main thread may restore handlers
            self._flags.stop(then_ignore=self.is_agreed)

    def _end_thread(self) -> None:
        """Ask the thread that watches for requests to end, and wait for it, up to 5 seconds."""
        self._is_ended.set()
        self._flags.has_arrived.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(5)

    # ---------------------------------------------------------------- the main thread

    def check(self, window: int, describe_position: Callable[[], tuple[str, bool]]) -> bool:
        """Report that this rank has reached a point at which it can stop. Return whether all ranks stop here.

        Only after a stop request does this wait for the other ranks. After the agreed stop it returns False.

        Args:
            window: Number of accumulation windows started so far.
            describe_position: Function that returns a pair. Its first element describes this rank's place in the script.
                All ranks must have equal descriptions to stop. The second element is whether an accumulation window is
                open. It is called only after a stop request.

        Raises:
            ControlPlaneError: If another rank does not answer a stop request within `ANSWER_TIMEOUT` seconds.
        """
        position = CheckPosition(window, 0)
        if window == self._position.window:
            position = CheckPosition(window, self._position.check + 1)
        else:
            now = time.monotonic()
            self._window_seconds = (self._window_seconds[1], now - self._window_start)
            self._window_start = now
        # Write the position before reading the reason. The thread uses the reverse order, so at least one of the two
        # sees what the other has written.
        self._position = position
        if not self.reason or self.is_agreed:
            return False
        return self._decide_to_stop(position, *describe_position())

    def _decide_to_stop(self, position: CheckPosition, script_position: str, is_open: bool) -> bool:
        """Return whether all ranks stop at this check, after a stop request. Wait for the other ranks at the target.

        Args:
            position: Position of this check.
            script_position: Description of this rank's place in the script.
            is_open: Whether an accumulation window is open. Ranks then stop only if windows are long.

        Raises:
            ControlPlaneError: If another rank does not answer the request in time.
        """
        if self._target is None:
            self._target, window_seconds = self._agree_on_target("post")
            self._can_stop_in_window = window_seconds > MAX_FINISHED_SECONDS
        self._move_target_forward()
        while position >= self._target and (self._can_stop_in_window or not is_open):
            # Set before checking for a second post. The thread posts in the reverse order. So it posts this check, or this
            # rank sees the post and moves the target.
            self._is_at_target = True
            if self._move_target_forward():
                self._is_at_target = False
                continue
            is_here = self._wait_for_arrivals(script_position)
            self._is_at_target = False
            if is_here:
                self._wait_until_all_have_read()
                self.is_agreed = True
                return True
            self._target = CheckPosition(self._target.window + 1, 0)
            self._attempt += 1
        return False

    def _move_target_forward(self) -> bool:
        """Move the target of the stop to a nearer check, even inside an accumulation window.

        Do nothing unless the threads have posted their positions a second time, which they do if no rank has stopped
        after a while.

        Returns:
            Whether this call has moved the target.
        """
        if self._can_stop_in_window or not self._has_posted_again:
            return False
        self._target, _ = self._agree_on_target("again")
        self._can_stop_in_window = True
        return True

    def _agree_on_target(self, name: str) -> tuple[CheckPosition, float]:
        """Agree with all ranks on the check at which they stop: the largest position that any rank has posted.

        Args:
            name: Key of the posts: "post" for the first ones after a request, "again" for the second ones.

        Returns:
            Position of the check, and the duration of an accumulation window in seconds on the slowest rank.

        Raises:
            ControlPlaneError: If a rank does not post its position in time.
        """
        keys = [self._make_key(f"{name}/{rank}") for rank in range(self._control.world_size)]
        deadline = time.monotonic() + ANSWER_TIMEOUT
        while missing := [rank for rank, key in enumerate(keys) if not self._control.has_key(key)]:
            if time.monotonic() > deadline:
                raise ControlPlaneError(
                    f"the run was asked to stop ({self.reason}), but {name_ranks(missing)} did not answer within "
                    f"{ANSWER_TIMEOUT:g} s. A rank that does not answer has died or is suspended. "
                    "Nothing was saved; resume from the last checkpoint"
                )
            time.sleep(0.005)
        posts = [self._control.get(key, timedelta(seconds=ANSWER_TIMEOUT)).decode().split() for key in keys]
        target = max(CheckPosition(int(window), int(check)) for window, check, _ in posts)
        return target, max(float(window_seconds) for _, _, window_seconds in posts)

    def _wait_for_arrivals(self, script_position: str) -> bool:
        """Wait for the other ranks, and return whether all of them are at this check and at equal places of the script.

        The last rank to arrive publishes the result. If a rank times out before that, it publishes that not all ranks
        have arrived.

        Args:
            script_position: Description of this rank's place in the script, which must be equal on all ranks.
        """
        control, verdict = self._control, self._make_key(f"{self._attempt}/verdict")
        # Another rank might be waiting for this one in a save that only the other rank makes.
        process.current().scope.get_or_create(Attendance).count_call("stopping")
        control.set(self._make_key(f"{self._attempt}/{control.rank}"), script_position.encode())
        if control.count(self._make_key(f"{self._attempt}/count")) == control.world_size:
            keys = [self._make_key(f"{self._attempt}/{rank}") for rank in range(control.world_size)]
            descriptions = {control.get(key, timedelta(seconds=ANSWER_TIMEOUT)) for key in keys}
            return control.set_once(verdict, b"here" if len(descriptions) == 1 else b"on") == b"here"
        deadline = time.monotonic() + ARRIVAL_TIMEOUT * 2**self._attempt
        while not control.has_key(verdict):
            if time.monotonic() > deadline:
                return control.set_once(verdict, b"on") == b"here"
            time.sleep(0.005)
        return control.set_once(verdict, b"on") == b"here"

    def _wait_until_all_have_read(self) -> None:
        """Report that this rank has read the decision. On rank 0, also wait until all other ranks have, at most 30 s.

        Rank 0's process might host the store, which would otherwise end before the other ranks have read from it.
        """
        control, all_read_key = self._control, self._make_key("known")
        if control.count(self._make_key("read")) == control.world_size:
            control.set(all_read_key, b"1")
        deadline = time.monotonic() + ANSWER_TIMEOUT
        while control.rank == 0 and not control.has_key(all_read_key) and time.monotonic() < deadline:
            time.sleep(0.005)

    def _make_key(self, name: str) -> str:
        """Return the key of a value of this agreement in the control plane's store."""
        return f"stopping/{self._name}/{name}"

    # ---------------------------------------------------------------- the thread

    def _run(self) -> None:
        """Look for stop requests of this rank and of others, and answer them, as the thread of this object."""
        try:
            while not self._is_ended.is_set():
                self._flags.has_arrived.wait(POLL_INTERVAL)
                self._flags.has_arrived.clear()
                if self.reason:
                    self._handle_delays()
                else:
                    self._check_for_request()
        except (ControlPlaneError, RuntimeError) as error:  # includes torch's DistError: the store's host is gone
            if not self._is_ended.is_set():
                log.info(
                    "signals no longer have an effect, because the connection to the control plane was lost: %s",
                    get_first_line(error),
                )

    def _check_for_request(self) -> None:
        """Check once for a stop request.

        If this rank has received a request, publish it; otherwise read the request of another rank. If there is one,
        also post the position of this rank's next check. If the launcher has marked the run as over, a request of this
        rank ends the process instead.
        """
        own_request = self._describe_own_request()
        if own_request and heartbeat_file.get_own_file().is_run_over and not self._flags.has_previous_handler:
            # Apply the default action of SIGTERM: another rank has failed, and the failure was reported.
            os._exit(128 + signal.SIGTERM)
        request_key = self._make_key("asked")
        if own_request:
            reason = self._control.set_once(request_key, own_request.encode())
        elif self._control.world_size > 1 and self._control.has_key(request_key):
            reason = self._control.get(request_key, timedelta(seconds=ANSWER_TIMEOUT))
        else:
            return
        self._request_time = time.monotonic()
        self.reason = reason.decode()
        self._post_position("post")

    def _post_position(self, name: str, *, is_at_check: bool = False) -> None:
        """Publish the position of this rank's next check, and the duration of its accumulation windows.

        Args:
            name: Key of the post, as in `_agree_on_target`.
            is_at_check: Whether this rank is in a check and waits there, so that this check counts as the next one.
        """
        window, check = self._position
        if not is_at_check:
            check += 1
        # Post the shorter of the last two durations, because one of them might include an evaluation.
        post = f"{window} {check} {min(self._window_seconds)}"
        self._control.set(self._make_key(f"{name}/{self._control.rank}"), post.encode())

    def _handle_delays(self) -> None:
        """After a stop request, handle a long accumulation window and repeated signals.

        If no rank has stopped after a while, request an earlier stop. If a signal is repeated, end this process,
        because it might never reach another check.
        """
        can_post_again = not self._has_posted_again and not self.is_agreed
        is_late = time.monotonic() - self._request_time > MAX_FINISHED_SECONDS
        if can_post_again and (is_late or self._control.has_key(self._make_key("hurry"))):
            self._control.set_once(self._make_key("hurry"), b"1")
            self._has_posted_again = True
            self._post_position("again", is_at_check=self._is_at_target)
        first, last = self._flags.arrival_times or (0.0, 0.0)
        if last - first > MIN_REPEAT_SECONDS and not self.is_agreed and not self._flags.has_previous_handler:
            os._exit(128 + (self._flags.lowest_signal or signal.SIGTERM))

    def _describe_own_request(self) -> str:
        """Return text that names the stop request, such as a signal, that this rank has received; "" if none."""
        number = self._flags.lowest_signal
        if number is not None:
            place = f" on rank {self._control.rank}" if self._control.world_size > 1 else ""
            return f"{signal.Signals(number).name}{place}"
        if self._deadline is not None and self._deadline.is_over:
            return "the end of the allotted time"
        return ""


class _Agreements:
    """Registry of the process's `StopAgreement` objects, of which at most one is active.

    Attributes:
        current: Active agreement; None before the first.
        num_started: Number of agreements so far. All ranks start agreements in the same order, so the number identifies
            an agreement on all ranks.
    """

    def __init__(self) -> None:
        self.current: StopAgreement | None = None
        self.num_started = 0


def start_agreement(signals: Sequence[int], deadline: Deadline | None) -> StopAgreement:
    """Create and start a `StopAgreement`, which replaces any earlier one of this process.

    The new agreement ends with the runtime. All ranks must call this in the same order.

    Args:
        signals: Numbers of the signals that request a stop.
        deadline: Time at which to stop the run even without a signal; None for no time limit.

    Raises:
        StateError: If called outside the main thread.
    """
    own = scope.get_or_create(_Agreements)
    if own.current is not None:
        own.current.stop()
        own.current = None
    stopping = StopAgreement(current(), signals, deadline, str(own.num_started))
    own.num_started += 1
    stopping.start()
    own.current = stopping
    process.release_at_end(stopping.stop)
    return stopping
