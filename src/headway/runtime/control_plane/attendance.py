"""Which ranks come to a call that not all of them may make, such as a save: they are asked over the control plane.

Each process counts what all ranks pass alike: exchanges of everyone, micro-batches, calls that need everyone. Who comes to
such a call says so there, and waits for the others. A rank that stands at the same count is here; one that is further, or
whose script is over, does not come: a thread of it says so while somebody waits::

    rank 0   ... micro-batch 7   save_state: says "7, first call", waits ...................... alone, and saves
    rank 1   ... micro-batch 7 ............ micro-batch 8   waits for rank 0's gradients
    its thread                                               "8, train.py:24"

Where two calls could be meant, as rank 0 comes to one line and rank 1 to another with nothing in between, they are taken to be one.

Calls on a sharded model that are exchanges of all ranks: one that only some ranks make is refused before it waits for ever.
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

import torch
import torch.distributed as dist

from headway.common import scope
from headway.common.callsite import Frame, users_frame, way
from headway.errors import ControlPlaneError, UnsupportedError
from headway.log import get_logger
from headway.runtime import heartbeat, process, pulse
from headway.runtime.control_plane.control import Control, current
from headway.runtime.control_plane.store import first_line, named
from headway.runtime.process import ProcessRuntime

SAVE = "save_state"
"""How a save is called where ranks wait for others to come to it."""

_LOOK = 0.2
"""Seconds between looks for somebody who waits."""

_SOON = 0.02
"""Seconds between answers while somebody does."""

_TOGETHER = 0.1
"""Seconds for all ranks to come to a call before the first to come looks at each of those that have not."""

_LOOKS = 2000
"""Looks a second that all ranks together make at most: one store answers them."""

_KEPT = 16
"""Calls whose keys stay in the store: nobody is that far behind who still asks."""

_CALLS = 64
"""Calls that a rank remembers: a forward that exchanges nothing may lie so far behind it when another rank comes to it."""

_READ = timedelta(seconds=30)

log = get_logger(__name__)

Place = tuple[int, int, int, str]
"""Exchanges of all ranks so far, micro-batches begun since the last of them, calls that need everyone since then; the last call."""

_ENDED: Place = (sys.maxsize, 0, 0, "")


@dataclass(frozen=True)
class Attended:
    """Who makes a call.

    Attributes:
        ranks: those that do, in order; this one is among them.
        call_site: the user's line.
        elsewhere: where the others have gone on to; empty where all ranks make it.
    """

    ranks: tuple[int, ...]
    call_site: str
    elsewhere: str = ""

    def __str__(self) -> str:
        """`at train.py:31 on rank 0 only: rank 1 has gone on to train.py:24`."""
        return f"at {self.call_site} on {named(self.ranks)} only: {self.elsewhere}"


class Attendance:
    """This process's count, and what it tells of it."""

    def __init__(self) -> None:
        self._place: Place = (0, 0, 0, "")
        self._left_out, self._paired_since = 0, -1
        self._made: deque[Place] = deque(maxlen=_CALLS)
        self._told: list[object] = []
        self._asked: deque[str] = deque()
        self._look, self._soon = _LOOK, _SOON
        self._control: Control | None = None
        self._name = ""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headway-attendance", daemon=True)

    def start(self, runtime: process.ProcessRuntime) -> None:
        """Answer the other ranks until the runtime ends; where it does so already, nothing changes."""
        if runtime.world_size == 1 or self._control is not None:
            return
        self._control = current()
        self._name = str(next(scope.own(_starts)))
        self._look, self._soon = (max(seconds, runtime.world_size / _LOOKS) for seconds in (_LOOK, _SOON))
        heartbeat.before_shutdown(self.stop)
        process.at_end(self.stop)
        process.at_end(self.count_group, is_engine=True)
        self._thread.start()

    def stop(self) -> None:
        """Come to no more calls, and tell so."""
        self._over.set()
        self._thread.join(5)

    # ---------------------------------------------------------------- counting

    def count_group(self) -> None:
        """The process group ends, perhaps in the middle of an exchange that some ranks have begun; what follows is counted anew."""
        self._place = (((self._place[0] >> 32) + 1) << 32, 0, 0, "")
        self._left_out = 0

    def count_exchange(self) -> None:
        """An exchange of all ranks begins."""
        self._left_out = _sequence()  # first, as the thread that answers may look in between
        self._place = (self._place[0] + 1, 0, 0, "")

    @contextmanager
    def between_two(self) -> Iterator[None]:
        """A message from one rank to another is under way, which gloo counts with the collectives, and other ranks do not pass."""
        self._paired_since = _sequence()
        try:
            yield
        finally:
            self._left_out += _sequence() - self._paired_since
            self._paired_since = -1

    def _collectives(self) -> int:
        """How many collectives this process has entered in torch's default group since the last exchange of all ranks."""
        return (_sequence() if self._paired_since < 0 else self._paired_since) - self._left_out

    def count_micro_batch(self, window: int, number: int) -> None:
        """A micro-batch begins."""
        self._place = (self._place[0], self._place[1] + 1, 0, "")

    def count_call(self, name: str) -> None:
        """A call begins that all ranks make.

        Args:
            name: what is called.
        """
        exchanges, batches, calls, _ = self._place
        self._place = (exchanges, batches, calls + 1, name)
        self._made.append(self._place)

    # ---------------------------------------------------------------- asking

    def who_comes(self, name: str) -> Attended:
        """Which ranks make the call that begins here; waits until each has come to it or gone past.

        Args:
            name: what is called, the same on all ranks.
        """
        self.count_call(name)
        return self.who_is_here()

    def who_is_here(self) -> Attended:
        """The same for a call that has been counted."""
        control, site = self._control, _users_line()
        if control is None:
            return Attended((0,), site)
        own = pulse.own()
        own.set_transfer(self._place[-1])
        try:
            return self._ask(control, site)
        finally:
            own.set_transfer("")

    def _ask(self, control: Control, site: str) -> Attended:
        key = self._key(str(self._place))
        self._forget(control, key)
        control.set(f"{key}/{control.rank}", b"")
        arrived = control.count(f"{key}/count")
        if arrived == control.world_size:
            control.set_once(f"{key}/gone", b"{}")
        elif arrived == 1 and not self._is_decided(control, key, _TOGETHER):
            control.count(self._key("waiting"))
            try:
                control.set_once(f"{key}/gone", json.dumps(self._find_absent(control, key)).encode())
            finally:
                control.count(self._key("waiting"), -1)
        self._is_decided(control, key, math.inf)
        gone = {int(rank): where for rank, where in json.loads(control.get(f"{key}/gone", _READ)).items()}
        ranks = tuple(rank for rank in range(control.world_size) if rank not in gone)
        return Attended(ranks, site, "; ".join(f"{named([rank])} {gone[rank]}" for rank in sorted(gone)))

    def _is_decided(self, control: Control, key: str, seconds: float) -> bool:
        """Is it known who comes, or will it be within so many seconds? The first rank to come finds out, or the last one does."""
        began = time.monotonic()
        while (waited := time.monotonic() - began) < seconds:
            if control.has(f"{key}/gone"):
                return True
            time.sleep(min(self._soon, waited / 20))
        return False

    def _forget(self, control: Control, key: str) -> None:
        """Keys of calls long ago go: the store must not grow with a run's saves."""
        self._asked.append(key)
        if len(self._asked) > _KEPT:
            former = self._asked.popleft()
            for name in (str(control.rank), *(("count", "gone") if control.rank == 0 else ())):
                control.delete(f"{former}/{name}")

    def _find_absent(self, control: Control, key: str) -> dict[int, str]:
        """The ranks that have gone on, with where to."""
        gone: dict[int, str] = {}
        sequence = self._collectives()
        exchanges, batches, calls, _ = self._place
        undecided = [rank for rank in range(control.world_size) if rank != control.rank]
        while undecided and not control.has(f"{key}/gone"):
            for rank in list(undecided):
                place, number, where, made = self._answer(control, rank)
                # Looked for last: who has come goes on with all that have. Who knew the place before has not asked.
                if place == self._place or self._place in made or control.has(f"{key}/{rank}"):
                    undecided.remove(rank)
                # The second: it is in a collective that the script calls in torch itself.
                elif place[:3] >= self._place[:3] or (
                    place[:3] == (exchanges, batches, calls - 1) and number > sequence
                ):
                    undecided.remove(rank)
                    gone[rank] = where
            time.sleep(self._soon)
        return gone

    def _answer(self, control: Control, rank: int) -> tuple[Place, int, str, list[Place]]:
        """What a rank has told last: its place, how many collectives of torch's it has entered since, where it was, and its calls."""
        key = self._key(f"at/{rank}")
        if not control.has(key):
            return (0, 0, 0, ""), 0, "", []
        place, number, site, made = json.loads(control.get(key, _READ))
        where = "has come to the end of its script" if place[0] == _ENDED[0] else f"has gone on to {site}"
        return tuple(place), number, where, [tuple(each) for each in made]

    # ---------------------------------------------------------------- answering

    def _run(self) -> None:
        assert self._control is not None
        is_asked = False
        try:
            while not self._over.wait(self._soon if is_asked else self._look):
                is_asked = self._control.count(self._key("waiting"), 0) > 0
                if is_asked:
                    self._tell(self._control, self._place)
            self._tell(self._control, _ENDED)
        except (ControlPlaneError, RuntimeError) as error:  # torch's DistError among them: its host is gone
            log.debug("this rank answers no more: %s", first_line(error))

    def _tell(self, control: Control, place: Place) -> None:
        """Make known where this rank is, if that is news."""
        told = [place, self._collectives()]
        if told != self._told:
            self._told = told
            site = _users_line(sys._current_frames().get(threading.main_thread().ident or 0))
            control.set(self._key(f"at/{control.rank}"), json.dumps([*told, site, [*self._made]]).encode())

    def _key(self, name: str) -> str:
        return f"calls/{self._name}/{name}"


def _users_line(frame: FrameType | None = None) -> str:
    """`train.py:12 in main`; of the caller where no frame is given."""
    users = users_frame(frame)
    return "an unknown place" if users is None else str(Frame.of(users))


def _sequence() -> int:
    """How many collectives this process has entered in torch's default group."""
    group = dist.group.WORLD if dist.is_initialized() else None
    try:
        engines: list[Any] = [] if group is None else [group._get_backend(kind) for kind in group._device_types]
        return sum(int(engine._get_sequence_number_for_group()) for engine in engines)
    except RuntimeError:  # one that does not count
        return 0


def _starts() -> Iterator[int]:
    """Numbers for the runtimes of this process: ranks begin them alike."""
    return itertools.count()


_DEPTH = 12
"""How many frames tell one way to a call from another."""


class RankConditionalCallCheck:
    """Asks, at the first call from each place, whether the other ranks come to it.

    Args:
        runtime: this process.
        strategy: under which a forward is an exchange, for the message.
    """

    def __init__(self, runtime: ProcessRuntime, strategy: str) -> None:
        self._runtime = runtime
        self._strategy = strategy
        self._seen: set[tuple[tuple[int, int], ...]] = set()

    def __call__(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A forward begins.

        Raises:
            UnsupportedError: other ranks do not come here.
        """
        if not torch.compiler.is_compiling():  # it cannot trace a walk up the stack
            # An evaluation of one rank must not be taken for the others' next step.
            action = "a forward" if torch.is_grad_enabled() else "a forward without gradients"
            self.check(f"{type(model).__name__} is called", action)

    def check(self, call: str, action: str) -> None:
        """A call begins that needs all ranks.

        Args:
            call: what is called, as the beginning of a sentence.
            action: what needs all parts of the model.

        Raises:
            UnsupportedError: other ranks do not come here.
        """
        attendance = self._runtime.scope.own(Attendance)
        attendance.count_call(action)
        key = way(_DEPTH)
        if key in self._seen:
            return
        self._seen.add(key)
        attended = attendance.who_is_here()
        if attended.elsewhere:
            raise UnsupportedError(
                f"{call} {attended}. Under the {self._strategy} strategy each rank holds a part of the model, and {action} needs "
                "all parts. Call it on every rank, and put only the code that uses the result under the condition"
            )
