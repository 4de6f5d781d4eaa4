"""Attendance check, which finds out which ranks take part in a call that some ranks may skip, such as a save.

Each process counts events that occur in the same order on all ranks: collectives over all ranks, starts of
micro-batches, and calls that need all ranks. A rank that makes a call that others may skip announces the call on the
control plane and waits for the other ranks. A rank whose count is equal has arrived at the call. A rank whose count is
higher, or whose script has ended, will not make the call. While any rank waits, a thread of each rank publishes the
rank's count::

    rank 0   ... micro-batch 7   save_state: announces "7, first call", waits ................. alone, and saves
    rank 1   ... micro-batch 7 ............ micro-batch 8   waits for rank 0's gradients
    its thread                                               "8, train.py:24"

If rank 0 reaches one save and rank 1 another, with no counted event between the two, the saves cannot be distinguished
and are treated as one call.

`RankConditionalCallCheck` applies this check to calls on a sharded model, which contain collectives of all ranks. If
only some ranks make such a call, it raises an error instead of waiting forever.
"""

import itertools
import json
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any

import torch.distributed as dist

from headway.common import scope
from headway.common.callsite import Frame, find_user_frame
from headway.core.runtime import heartbeat, process, pulse
from headway.core.runtime.control_plane.control import Control, current
from headway.core.runtime.control_plane.roll_call import name_ranks
from headway.core.runtime.control_plane.store import get_first_line
from headway.errors import ControlPlaneError
from headway.log import get_logger

SAVE = "save_state"
"""Name of the call in which ranks save a checkpoint together."""

_LOOK = 0.2
"""Seconds between two checks for a rank that waits for this one."""

_SOON = 0.02
"""Seconds between two publications of this rank's count while another rank waits."""

_TOGETHER = 0.1
"""Seconds that the first rank to arrive waits for all others, before it looks up where each missing rank is."""

_LOOKS = 2000
"""Maximum number of checks per second over all ranks. A single store has to answer all of them."""

_KEPT = 16
"""Number of latest calls (such as saves) whose keys stay in the store. No rank reads the keys of an older call."""

_CALLS = 64
"""Number of latest calls that a rank remembers and publishes.

A rank that is up to this many calls behind, and waits in one of them, can then see that this rank has already made that
call. Ranks drift apart in calls without collectives, such as some forwards.
"""

_READ = timedelta(seconds=30)

log = get_logger(__name__)

Place = tuple[int, int, int, str]
"""Progress of a rank, as a tuple of counters.

The elements are: the number of collectives over all ranks, the number of micro-batches since the last such collective,
the number of calls that need all ranks since the last micro-batch, and the name of the last such call.
"""

_ENDED: Place = (sys.maxsize, 0, 0, "")


@dataclass(frozen=True)
class CallParticipants:
    """Ranks that take part in a call that some ranks may skip, with the lines that the other ranks have reached.

    Attributes:
        ranks: Ranks that take part, in ascending order, including this one.
        call_site: Line of user code that makes the call.
        elsewhere: Text that says where the other ranks are instead: a line of user code, or the end of the script. Empty
            if all ranks take part.
        note: Text that the first of the participating ranks passed to `find_participants`. If all ranks take part, or if
            this rank passed no text, the text that this rank passed.
    """

    ranks: tuple[int, ...]
    call_site: str
    elsewhere: str = ""
    note: str = ""

    def __str__(self) -> str:
        """Return text for messages, such as "at train.py:31 on rank 0 only: rank 1 has gone on to train.py:24"."""
        return f"at {self.call_site} on {name_ranks(self.ranks)} only: {self.elsewhere}"


class Attendance:
    """Counts of this process's collectives, micro-batches and calls, which a thread publishes while other ranks wait.

    Before a call that some ranks may skip, such as a save, `find_participants` returns which ranks take part.
    """

    def __init__(self) -> None:
        self._place: Place = (0, 0, 0, "")
        self._select_excluded = 0
        self._paired_since = -1
        self._made: deque[Place] = deque(maxlen=_CALLS)
        self._is_replaying = False
        self._told: list[object] = []
        self._asked: deque[str] = deque()
        self._look = _LOOK
        self._soon = _SOON
        self._control: Control | None = None
        self._name = ""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headway-attendance", daemon=True)

    def start(self, runtime: process.ProcessRuntime) -> None:
        """Start the thread that publishes this rank's counts. It runs until the runtime ends.

        Do nothing in a run with a single process, or if the thread is already running.
        """
        if runtime.world_size == 1 or self._control is not None:
            return
        self._control = current()
        self._name = str(next(scope.get_or_create(_count_runtimes)))
        self._look = max(_LOOK, runtime.world_size / _LOOKS)
        self._soon = max(_SOON, runtime.world_size / _LOOKS)
        heartbeat.stop_before_shutdown(self.stop)
        process.release_at_end(self.stop)
        process.release_at_end(self.restart_count, ends_with_group=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread, and publish that this rank will take part in no more calls."""
        self._over.set()
        self._thread.join(5)

    # ---------------------------------------------------------------- counting

    def restart_count(self) -> None:
        """Restart the count of collectives when the process group ends.

        The ranks' counts can differ at that time, because some ranks might have started a collective that others have
        not. The new count is equal on all ranks.
        """
        self._place = (((self._place[0] >> 32) + 1) << 32, 0, 0, "")
        self._select_excluded = 0

    def count_collective(self) -> None:
        """Count a collective over all ranks that is about to start."""
        self._select_excluded = _count_collectives()  # set it first, because the answering thread might read in between
        self._place = (self._place[0] + 1, 0, 0, "")

    @contextmanager
    def exclude_pair_messages(self) -> Iterator[None]:
        """Return a context in which messages between two ranks are not counted.

        gloo counts such messages as collectives, although only two ranks take part.
        """
        self._paired_since = _count_collectives()
        try:
            yield
        finally:
            self._select_excluded += _count_collectives() - self._paired_since
            self._paired_since = -1

    def _count_collectives(self) -> int:
        """Return the number of collectives entered in torch's default group since the last call of `count_collective`.

        Messages between two ranks are not counted.
        """
        return (_count_collectives() if self._paired_since < 0 else self._paired_since) - self._select_excluded

    def count_micro_batch(self, window: int, number: int) -> None:
        """Count a micro-batch that is about to start. The arguments of `StepHooks.micro_batch_begun` are not used."""
        self._place = (self._place[0], self._place[1] + 1, 0, "")

    def count_call(self, name: str) -> None:
        """Count a call that is about to start and that needs all ranks.

        Args:
            name: Name of the call, equal on all ranks, such as "save_state".
        """
        exchanges, batches, calls, _ = self._place
        self._place = (exchanges, batches, calls + 1, name)
        self._made.append(self._place)

    # ---------------------------------------------------------------- asking other ranks

    def find_participants(self, name: str, note: str = "") -> CallParticipants:
        """Register that this rank enters a call that other ranks may skip, and return which ranks take part in it.

        Wait until every rank has either entered the call or continued its script without making it. The wait has no
        time limit.

        Args:
            name: Name of the call, equal on all ranks, such as "save_state".
            note: Text for the other ranks, which they receive if this rank is the first of those that take part.
                Default: "".
        """
        self.count_call(name)
        return self.find_current_participants(note)

    def find_current_participants(self, note: str = "") -> CallParticipants:
        """Return which ranks take part in the call that this rank registered last with `count_call`.

        A call is an operation that needs all ranks but that a script may make on some ranks only, such as a save. Wait
        until every rank has either entered the call or continued its script without making it. After the runtime has
        ended, return all ranks without asking them.

        Args:
            note: Text for the other ranks, as in `find_participants`. Default: "".
        """
        control, site = self._control, _find_users_line()
        if control is None:
            return CallParticipants((0,), site, note=note)
        if self._over.is_set():  # the runtime has ended, and no rank answers any more
            return CallParticipants(tuple(range(control.world_size)), site, note=note)
        own = pulse.get_own_pulse()
        own.set_transfer(self._place[-1])
        try:
            return self._ask_who_joins(control, site, note)
        finally:
            own.set_transfer("")

    def _ask_who_joins(self, control: Control, site: str, note: str) -> CallParticipants:
        key = self._make_key(str(self._place))
        self._delete_old_key(control, key)
        control.set(f"{key}/{control.rank}", note.encode())
        arrived = control.count(f"{key}/count")
        if arrived == control.world_size:
            control.set_once(f"{key}/gone", b"{}")
        elif arrived == 1 and not self._is_decided(control, key, _TOGETHER):
            control.count(self._make_key("waiting"))
            try:
                control.set_once(f"{key}/gone", json.dumps(self._find_absent(control, key)).encode())
            finally:
                control.count(self._make_key("waiting"), -1)
        self._is_decided(control, key, math.inf)
        gone = {int(rank): where for rank, where in json.loads(control.get(f"{key}/gone", _READ)).items()}
        ranks = tuple(rank for rank in range(control.world_size) if rank not in gone)
        if note and gone and ranks[0] != control.rank:
            note = control.get(f"{key}/{ranks[0]}", _READ).decode()
        elsewhere = "; ".join(f"{name_ranks([rank])} {gone[rank]}" for rank in sorted(gone))
        return CallParticipants(ranks, site, elsewhere, note)

    def _is_decided(self, control: Control, key: str, seconds: float) -> bool:
        """Wait until a rank has published which ranks take part in the call that this rank has entered.

        If all ranks arrive at the call, the last rank to arrive publishes the list. Otherwise the first rank does.

        Args:
            control: Control plane client.
            key: Key prefix of the call.
            seconds: Maximum time to wait.

        Returns:
            Whether the list was published within `seconds`.
        """
        began = time.monotonic()
        while (waited := time.monotonic() - began) < seconds:
            if control.has_key(f"{key}/gone"):
                return True
            time.sleep(min(self._soon, waited / 20))
        return False

    def _delete_old_key(self, control: Control, key: str) -> None:
        """Delete this rank's key of the call that it announced 16 calls ago, so that the store stays small.

        Rank 0 also deletes the keys of that call that all ranks share. No rank reads them any more.

        Args:
            control: Control plane client.
            key: Key prefix of the call that this rank announces now.
        """
        self._asked.append(key)
        if len(self._asked) > _KEPT:
            former = self._asked.popleft()
            for name in (str(control.rank), *(("count", "gone") if control.rank == 0 else ())):
                control.delete(f"{former}/{name}")

    def _find_absent(self, control: Control, key: str) -> dict[int, str]:
        """Return the ranks that have continued their script without making the call that this rank waits in.

        Wait until this is known for every rank, or until another rank has published the list.

        Args:
            control: Control plane client.
            key: Key prefix of the call.

        Returns:
            For each such rank, a phrase that says where its script is now.
        """
        gone: dict[int, str] = {}
        sequence = self._count_collectives()
        exchanges, batches, calls, _ = self._place
        undecided = [rank for rank in range(control.world_size) if rank != control.rank]
        while undecided and not control.has_key(f"{key}/gone"):
            for rank in list(undecided):
                place, number, where, made, is_replaying = self._read_state_of(control, rank)
                # Check arrival after reading the place, because a rank that had arrived might have moved on with the
                # others by then. A rank that lists this place among its calls made the call without asking.
                if is_replaying or place == self._place or self._place in made or control.has_key(f"{key}/{rank}"):
                    undecided.remove(rank)
                # Second case: the rank is in a collective that the script calls directly through torch.
                elif place[:3] >= self._place[:3] or (
                    place[:3] == (exchanges, batches, calls - 1) and number > sequence
                ):
                    undecided.remove(rank)
                    gone[rank] = where
            time.sleep(self._soon)
        return gone

    def _read_state_of(self, control: Control, rank: int) -> tuple[Place, int, str, list[Place], bool]:
        """Return the state that a rank has published most recently.

        Returns:
            Tuple of (progress of the rank, number of collectives entered since the last one that its progress counts,
                phrase that says where its script is, its latest calls, whether it joins every call of other ranks).
        """
        key = self._make_key(f"at/{rank}")
        if not control.has_key(key):
            return (0, 0, 0, ""), 0, "", [], False
        place, number, is_replaying, site, made = json.loads(control.get(key, _READ))
        where = "has come to the end of its script" if place[0] == _ENDED[0] else f"has gone on to {site}"
        return tuple(place), number, where, [tuple(each) for each in made], is_replaying

    @contextmanager
    def join_every_call(self) -> Iterator[None]:
        """Return a context in which this rank takes part in every call that other ranks ask about.

        A rank that ran out of memory uses this context while it joins the collectives of the others without making
        their calls.
        """
        self._is_replaying = True
        try:
            yield
        finally:
            self._is_replaying = False

    # ---------------------------------------------------------------- answering other ranks

    def _run(self) -> None:
        assert self._control is not None
        is_asked = False
        try:
            while not self._over.wait(self._soon if is_asked else self._look):
                is_asked = self._control.count(self._make_key("waiting"), 0) > 0
                if is_asked:
                    self._publish_state(self._control, self._place)
            self._publish_state(self._control, _ENDED)
        except (ControlPlaneError, RuntimeError) as error:  # includes torch's DistError: the store's host is gone
            log.debug("this rank answers no more: %s", get_first_line(error))

    def _publish_state(self, control: Control, place: Place) -> None:
        """Publish this rank's progress, its number of collectives, and whether it joins every call of other ranks.

        Do nothing if all three are unchanged since they were last published.
        """
        published = [place, self._count_collectives(), self._is_replaying]
        if published != self._told:
            self._told = published
            site = _find_users_line(sys._current_frames().get(threading.main_thread().ident or 0))
            control.set(self._make_key(f"at/{control.rank}"), json.dumps([*published, site, [*self._made]]).encode())

    def _make_key(self, name: str) -> str:
        return f"calls/{self._name}/{name}"


def _find_users_line(frame: FrameType | None = None) -> str:
    """Return the innermost line of user code as `train.py:12 in main`.

    Args:
        frame: Innermost frame to search. Default: the caller's own frame.
    """
    users = find_user_frame(frame)
    return "an unknown place" if users is None else str(Frame.from_frame(users))


def _count_collectives() -> int:
    """Return the number of collectives that this process has entered in torch's default group."""
    group = dist.group.WORLD if dist.is_initialized() else None
    try:
        engines: list[Any] = [] if group is None else [group._get_backend(kind) for kind in group._device_types]
        return sum(int(engine._get_sequence_number_for_group()) for engine in engines)
    except RuntimeError:  # a backend without a counter
        return 0


def _count_runtimes() -> Iterator[int]:
    """Return a new counter that numbers the runtimes of this process.

    All ranks start runtimes in the same order, so a number identifies the same runtime on all ranks.
    """
    return itertools.count()
