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
from typing import Any, NamedTuple

import torch.distributed as dist

from headway.common import scope
from headway.common.callsite import Frame, find_user_frame
from headway.core.runtime import heartbeat, heartbeat_file, process
from headway.core.runtime.control_plane.control import Control, current
from headway.core.runtime.control_plane.roll_call import name_ranks
from headway.core.runtime.control_plane.store import get_first_line
from headway.errors import ControlPlaneError
from headway.log import get_logger

SAVE_CALL = "save_state"
"""Name of the call in which ranks save a checkpoint together."""

_IDLE_INTERVAL = 0.2
"""Seconds between two checks for a rank that waits for this one."""

_WAIT_INTERVAL = 0.02
"""Seconds between two publications of this rank's count while another rank waits."""

_FIRST_WAIT = 0.1
"""Seconds that the first rank to arrive waits for all others, before it looks up where each missing rank is."""

_MAX_CHECKS_PER_SECOND = 2000
"""Maximum number of checks per second over all ranks. A single store has to answer all of them."""

_NUM_KEPT_CALLS = 16
"""Number of latest calls (such as saves) whose keys stay in the store. No rank reads the keys of an older call."""

_NUM_LATEST_CALLS = 64
"""Number of latest calls that a rank remembers and publishes.

A rank that is up to this many calls behind, and waits in one of them, can then see that this rank has already made that
call. Ranks drift apart in calls without collectives, such as some forwards.
"""

_READ_TIMEOUT = timedelta(seconds=30)

log = get_logger(__name__)


class Progress(NamedTuple):
    """Progress of a rank, as counters that all ranks increase in the same order.

    A larger value means that a rank is further ahead in its script.

    Attributes:
        collectives: Number of collectives over all ranks.
        micro_batches: Number of micro-batches started since the last such collective.
        calls: Number of calls that need all ranks, since the last micro-batch or collective.
        call_name: Name of the last such call, such as "save_state"; "" if there is none.
    """

    collectives: int = 0
    micro_batches: int = 0
    calls: int = 0
    call_name: str = ""

    @property
    def counts(self) -> tuple[int, int, int]:
        """Counters without the name of the call, for comparisons."""
        return self.collectives, self.micro_batches, self.calls

    def __str__(self) -> str:
        """Return text that identifies this progress in keys of the store."""
        return str(tuple(self))


_ENDED = Progress(collectives=sys.maxsize)
"""Progress that a rank publishes when its script has ended."""


class _RankState(NamedTuple):
    """State that a rank has published most recently.

    Attributes:
        progress: Progress of the rank.
        num_collectives: Number of torch's collectives that the rank has entered since the last one that its progress
            counts.
        position: Phrase that says where the rank's script is, such as "has continued to train.py:24".
        latest_calls: Progress at the rank's latest calls.
        joins_every_call: Whether the rank takes part in every call of other ranks (`join_every_call`).
    """

    progress: Progress = Progress()
    num_collectives: int = 0
    position: str = ""
    latest_calls: tuple[Progress, ...] = ()
    joins_every_call: bool = False


@dataclass(frozen=True)
class CallParticipants:
    """Ranks that take part in a call that some ranks may skip, with the lines that the other ranks have reached.

    Attributes:
        ranks: Ranks that take part, in ascending order, including this one.
        call_site: Line of user code that makes the call.
        absence: Text that says where the other ranks are instead: a line of user code, or the end of the script. Empty
            if all ranks take part.
        note: Text that the first of the participating ranks passed to `find_participants`. If all ranks take part, or if
            this rank passed no text, the text that this rank passed.
    """

    ranks: tuple[int, ...]
    call_site: str
    absence: str = ""
    note: str = ""

    def __str__(self) -> str:
        """Return text for messages, such as "at train.py:31 on rank 0 only: rank 1 has continued to train.py:24"."""
        return f"at {self.call_site} on {name_ranks(self.ranks)} only: {self.absence}"


class Attendance:
    """Counts of this process's collectives, micro-batches and calls, which a thread publishes while other ranks wait.

    Before a call that some ranks may skip, such as a save, `find_participants` returns which ranks take part.
    """

    def __init__(self) -> None:
        self._progress = Progress()
        # Collectives of torch that are not counted: those up to the last counted one, and messages between two ranks since.
        self._num_excluded = 0
        # Number of collectives at the start of `exclude_pair_messages`; -1 outside of it.
        self._pair_messages_start = -1
        self._latest_calls: deque[Progress] = deque(maxlen=_NUM_LATEST_CALLS)  # progress at each of the latest calls
        self._joins_every_call = False
        # Progress, number of collectives, and `_joins_every_call`, as this rank has published them last.
        self._last_published: list[object] = []
        self._announced_keys: deque[str] = deque()  # key prefixes of this rank's latest calls, oldest first
        # Seconds between two checks for waiting ranks, and between two publications while a rank waits. Larger in large
        # runs, so that the store can answer all ranks.
        self._idle_interval = _IDLE_INTERVAL
        self._wait_interval = _WAIT_INTERVAL
        self._control: Control | None = None  # None before `start`, and in a run with a single process
        self._runtime_number = ""  # number of the process's runtime, which is part of all keys
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headway-attendance", daemon=True)

    def start(self, runtime: process.ProcessRuntime) -> None:
        """Start the thread that publishes this rank's counts. It runs until the runtime ends.

        Do nothing in a run with a single process, or if the thread is already running.
        """
        if runtime.world_size == 1 or self._control is not None:
            return
        self._control = current()
        self._runtime_number = str(next(scope.get_or_create(_create_runtime_counter)))
        self._idle_interval = max(_IDLE_INTERVAL, runtime.world_size / _MAX_CHECKS_PER_SECOND)
        self._wait_interval = max(_WAIT_INTERVAL, runtime.world_size / _MAX_CHECKS_PER_SECOND)
        heartbeat.stop_before_shutdown(self.stop)
        process.release_at_end(self.stop)
        process.release_at_end(self.restart_count, ends_with_group=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread, and publish that this rank will take part in no more calls."""
        self._is_stopped.set()
        self._thread.join(5)

    # ---------------------------------------------------------------- counting

    def restart_count(self) -> None:
        """Restart the count of collectives when the process group ends.

        The ranks' counts can differ at that time, because some ranks might have started a collective that others have
        not. The new count is equal on all ranks.
        """
        # The upper 32 bits count the process groups, so that the new count is larger than the old count of any rank.
        num_groups = (self._progress.collectives >> 32) + 1
        self._progress = Progress(collectives=num_groups << 32)
        self._num_excluded = 0

    def count_collective(self) -> None:
        """Count a collective over all ranks that is about to start."""
        self._num_excluded = _count_collectives()  # set it first, because the publishing thread might read in between
        self._progress = Progress(collectives=self._progress.collectives + 1)

    @contextmanager
    def exclude_pair_messages(self) -> Iterator[None]:
        """Return a context in which messages between two ranks are not counted.

        gloo counts such messages as collectives, although only two ranks take part.
        """
        self._pair_messages_start = _count_collectives()
        try:
            yield
        finally:
            self._num_excluded += _count_collectives() - self._pair_messages_start
            self._pair_messages_start = -1

    def _count_collectives(self) -> int:
        """Return the number of collectives entered in torch's default group since the last call of `count_collective`.

        Messages between two ranks are not counted.
        """
        is_counting = self._pair_messages_start < 0
        num_collectives = _count_collectives() if is_counting else self._pair_messages_start
        return num_collectives - self._num_excluded

    def count_micro_batch(self, window: int, number: int) -> None:
        """Count a micro-batch that is about to start. This is a listener of `StepHooks.micro_batch_begun`.

        Args:
            window: Number of the accumulation window. Unused.
            number: Number of the micro-batch in the window. Unused.
        """
        progress = self._progress
        self._progress = Progress(progress.collectives, progress.micro_batches + 1)

    def count_call(self, name: str) -> None:
        """Count a call that is about to start and that needs all ranks.

        Args:
            name: Name of the call, equal on all ranks, such as "save_state".
        """
        self._progress = self._progress._replace(calls=self._progress.calls + 1, call_name=name)
        self._latest_calls.append(self._progress)

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
        control, call_site = self._control, _find_users_line()
        if control is None:
            return CallParticipants((0,), call_site, note=note)
        if self._is_stopped.is_set():  # the runtime has ended, and no rank answers any more
            return CallParticipants(tuple(range(control.world_size)), call_site, note=note)
        own = heartbeat_file.get_own_file()
        own.set_transfer(self._progress.call_name)
        try:
            return self._determine_participants(control, call_site, note)
        finally:
            own.set_transfer("")

    def _determine_participants(self, control: Control, call_site: str, note: str) -> CallParticipants:
        """Agree with the other ranks on which of them take part in a call.

        Each rank reports its arrival. If all arrive, the last one publishes that no rank is absent. If not, the first one to
        arrive publishes which ranks have moved past the call, and everyone reads this decision.

        Args:
            control: Control plane of the run.
            call_site: Location of the call in the script.
            note: Text of this rank. If ranks are absent, all ranks get the note of the first rank that takes part.
        """
        key = self._make_key(str(self._progress))
        self._delete_old_key(control, key)
        control.set(f"{key}/{control.rank}", note.encode())
        arrived = control.count(f"{key}/count")
        if arrived == control.world_size:
            control.set_once(f"{key}/gone", b"{}")
        elif arrived == 1 and not self._wait_for_decision(control, key, _FIRST_WAIT):
            control.count(self._make_key("waiting"))
            try:
                control.set_once(f"{key}/gone", json.dumps(self._find_absent(control, key)).encode())
            finally:
                control.count(self._make_key("waiting"), -1)
        self._wait_for_decision(control, key, math.inf)
        decision = json.loads(control.get(f"{key}/gone", _READ_TIMEOUT))
        absent = {int(rank): position for rank, position in decision.items()}
        ranks = tuple(rank for rank in range(control.world_size) if rank not in absent)
        if note and absent and ranks[0] != control.rank:
            note = control.get(f"{key}/{ranks[0]}", _READ_TIMEOUT).decode()
        absence = "; ".join(f"{name_ranks([rank])} {absent[rank]}" for rank in sorted(absent))
        return CallParticipants(ranks, call_site, absence, note)

    def _wait_for_decision(self, control: Control, key: str, seconds: float) -> bool:
        """Wait until a rank has published which ranks take part in the call that this rank has entered.

        If all ranks arrive at the call, the last rank to arrive publishes the list. Otherwise the first rank does.

        Args:
            control: Control plane client.
            key: Key prefix of the call.
            seconds: Maximum time to wait.

        Returns:
            Whether the list was published within `seconds`.
        """
        start = time.monotonic()
        while (waited := time.monotonic() - start) < seconds:
            if control.has_key(f"{key}/gone"):
                return True
            time.sleep(min(self._wait_interval, waited / 20))
        return False

    def _delete_old_key(self, control: Control, key: str) -> None:
        """Delete this rank's key of the call that it announced 16 calls ago, so that the store stays small.

        Rank 0 also deletes the keys of that call that all ranks share. No rank reads them any more.

        Args:
            control: Control plane client.
            key: Key prefix of the call that this rank announces now.
        """
        self._announced_keys.append(key)
        if len(self._announced_keys) > _NUM_KEPT_CALLS:
            old_key = self._announced_keys.popleft()
            names = [str(control.rank)]
            if control.rank == 0:
                names += ["count", "gone"]
            for name in names:
                control.delete(f"{old_key}/{name}")

    def _find_absent(self, control: Control, key: str) -> dict[int, str]:
        """Return the ranks that have continued their script without making the call that this rank waits in.

        Wait until this is known for every rank, or until another rank has published the list.

        Args:
            control: Control plane client.
            key: Key prefix of the call.

        Returns:
            For each such rank, a phrase that says where its script is now.
        """
        absent: dict[int, str] = {}
        own, own_collectives = self._progress, self._count_collectives()
        before_call = own._replace(calls=own.calls - 1)
        undecided = [rank for rank in range(control.world_size) if rank != control.rank]
        while undecided and not control.has_key(f"{key}/gone"):
            for rank in list(undecided):
                state = self._read_state(control, rank)
                # A rank that lists this call among its latest ones made it without asking.
                has_made_call = state.progress == own or own in state.latest_calls
                # Check arrival after reading the state, because a rank that had arrived might have moved on with the
                # others by then.
                if state.joins_every_call or has_made_call or control.has_key(f"{key}/{rank}"):
                    undecided.remove(rank)
                    continue
                # The rank might be just before this call, in a collective that the script calls directly through torch.
                is_just_before = state.progress.counts == before_call.counts
                is_in_collective = is_just_before and state.num_collectives > own_collectives
                if state.progress.counts >= own.counts or is_in_collective:
                    undecided.remove(rank)
                    absent[rank] = state.position
            time.sleep(self._wait_interval)
        return absent

    def _read_state(self, control: Control, rank: int) -> _RankState:
        """Return the state that a rank has published most recently, or an initial state if it has published none."""
        key = self._make_key(f"at/{rank}")
        if not control.has_key(key):
            return _RankState()
        values, num_collectives, joins_every_call, call_site, calls = json.loads(control.get(key, _READ_TIMEOUT))
        progress = Progress(*values)
        has_ended = progress.collectives == _ENDED.collectives
        position = "has come to the end of its script" if has_ended else f"has continued to {call_site}"
        latest_calls = tuple(Progress(*call) for call in calls)
        return _RankState(progress, num_collectives, position, latest_calls, joins_every_call)

    @contextmanager
    def join_every_call(self) -> Iterator[None]:
        """Return a context in which this rank takes part in every call that other ranks ask about.

        A rank that ran out of memory uses this context while it joins the collectives of the others without making
        their calls.
        """
        self._joins_every_call = True
        try:
            yield
        finally:
            self._joins_every_call = False

    # ---------------------------------------------------------------- answering other ranks

    def _run(self) -> None:
        """Publish this rank's position, as the thread of this object, whenever another rank waits for it."""
        assert self._control is not None
        is_awaited = False
        try:
            while not self._is_stopped.wait(self._wait_interval if is_awaited else self._idle_interval):
                is_awaited = self._control.count(self._make_key("waiting"), 0) > 0
                if is_awaited:
                    self._publish_state(self._control, self._progress)
            self._publish_state(self._control, _ENDED)
        except (ControlPlaneError, RuntimeError) as error:  # includes torch's DistError: the store's host is gone
            log.debug("this rank answers no more: %s", get_first_line(error))

    def _publish_state(self, control: Control, progress: Progress) -> None:
        """Publish this rank's progress, its number of collectives, and whether it joins every call of other ranks.

        Do nothing if all three are unchanged since they were last published.
        """
        published = [progress, self._count_collectives(), self._joins_every_call]
        if published != self._last_published:
            self._last_published = published
            call_site = _find_users_line(sys._current_frames().get(threading.main_thread().ident or 0))
            control.set(
                self._make_key(f"at/{control.rank}"),
                json.dumps([*published, call_site, [*self._latest_calls]]).encode(),
            )

    def _make_key(self, name: str) -> str:
        """Return the key of a value of this runtime in the control plane's store."""
        return f"calls/{self._runtime_number}/{name}"


def _find_users_line(frame: FrameType | None = None) -> str:
    """Return the innermost line of user code as `train.py:12 in main`.

    Args:
        frame: Innermost frame to search. Default: the caller's own frame.
    """
    users = find_user_frame(frame)
    return "an unknown place" if users is None else str(Frame.from_frame(users))


def _count_collectives() -> int:
    """Return the number of collectives that this process has entered in torch's default group."""
    if not dist.is_initialized() or dist.group.WORLD is None:
        return 0
    group: Any = dist.group.WORLD
    try:
        backends = [group._get_backend(device_type) for device_type in group._device_types]
        return sum(int(backend._get_sequence_number_for_group()) for backend in backends)
    except RuntimeError:  # a backend without a counter
        return 0


def _create_runtime_counter() -> Iterator[int]:
    """Return a new counter that numbers the runtimes of this process.

    All ranks start runtimes in the same order, so a number identifies the same runtime on all ranks.
    """
    return itertools.count()
