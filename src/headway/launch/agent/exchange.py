"""The agents' end of the control plane: machine 0's hosts it; all hear of aborts, and tell each other who failed first.

Every call to the store is made on a thread of this file's own: one whose machine is cut off may never return, and the
agent must end its workers all the same.
"""

import json
import secrets
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any

from headway.common.untrusted import Seal, plain
from headway.launch.agent.endings import FailureReport
from headway.launch.agent.records import ExceptionRecord, RankExit
from headway.runtime.control_plane.store import (
    NOTICE,
    SealedStore,
    StoreAddress,
    StoreLink,
    named,
    present,
    roll,
    serve,
)

_KEY = "headway/control"
_FAILED = "failed"

LOOK = 0.2
"""Seconds between looks for aborts and other machines' failures."""

GATHER = 8.0
"""Seconds that other machines get to say what failed there."""


TELL = 2.0
"""Seconds that machine 0 gets to say goodbye, and so to tell: mpirun ends all tasks when the first has ended."""


class AgentChannel:
    """One agent's way to the control plane, attempt by attempt.

    Args:
        machine, num_machines: this machine among the others.
        host: the address of machine 0, as the others reach it.
        seal: the user's, which becomes the run's.
        unit: "task" where each process has a launcher, and all of them one screen; only one of them then tells of a failure.

    Attributes:
        notice: why the run is to end, once somebody has said so.
        has_failed_elsewhere: has another machine told of a failure?
    """

    def __init__(self, machine: int, num_machines: int, host: str, seal: Seal, unit: str = "machine") -> None:
        self._machine = machine
        self._num_machines = num_machines
        self._host = host
        self._seal = seal
        self._salt = secrets.token_hex(16)
        self._has_one_screen = unit == "task"
        self._server: Any = None
        self._link: StoreLink | None = None
        self._world_size = 0
        self._num_here = num_machines
        self._left: tuple[int, ...] = ()
        self._own = ""
        self._others: dict[int, dict[str, Any]] = {}
        self._thread: threading.Thread | None = None
        self.notice = ""
        self.has_failed_elsewhere = False

    @property
    def seal(self) -> Seal:
        """Of the run, once an attempt has begun."""
        assert self._link is not None
        return self._link.seal

    def begin(
        self, meeting: SealedStore, world_size: int, attempt: int = 0, num_here: int | None = None, hub_port: int = 0
    ) -> StoreAddress:
        """Agree on the run's secret and a prefix of the attempt's own, and begin to listen.

        The secret is made from the user's and a salt that machine 0 draws. Without a user's the salt is all there is to know, so it
        is taken from the meeting when all have it.

        Args:
            meeting: where the agents have met, sealed with the user's secret.
            world_size: processes over all machines.
            attempt: its number, where all attempts meet at one store and are counted alike by all agents.
            num_here: how many of the machines take part in it; None: all.
            hub_port: where machine 0 listens for signs of life.

        Returns:
            Where this attempt's workers find the control plane.

        Raises:
            ControlPlaneError: what stands at the meeting was not written by machine 0 of this run.
        """
        self.end()  # else the former attempt's thread may still tell of that one's failures
        self._num_here = self._num_machines if num_here is None else num_here
        key = f"{_KEY}/{attempt}"
        if self._machine == 0:
            self._server = self._server or serve(self._host)
            prefix = secrets.token_hex(6)
            address = StoreAddress(self._host, self._server.port, prefix, key=self._salt, hub_port=hub_port)
            if self._num_machines > 1:
                meeting.set(key, address.encode().encode())
        else:
            address = StoreAddress.decode(meeting.get(key).decode())
            if meeting.add(f"{key}/read", 1) == self._num_here - 1:
                meeting.delete_key(key)
        address = replace(address, key=self._seal.derive(address.key))
        self._link = StoreLink(address, timedelta(seconds=30), strangers=self._seal.strangers)
        self._world_size, self._left, self._own, self._others = world_size, (), "", {}
        self.notice, self.has_failed_elsewhere = "", False
        self._thread = threading.Thread(target=self._listen, args=(self._link,), name="control", daemon=True)
        self._thread.start()
        return address

    def note_left(self, ranks: Sequence[int]) -> None:
        """Ranks of this machine that have ended without an error."""
        self._left = tuple(ranks)

    def end(self) -> None:
        """Stop listening: a thread that comes back from C++ while Python shuts down would abort this process."""
        self._link, thread = None, self._thread
        if thread is not None:
            thread.join(5)

    # ---------------------------------------------------------------- listening

    def _listen(self, link: StoreLink) -> None:
        """One attempt's thread: a later one begins another and ends this."""
        try:
            store = link.store
            while link is self._link:
                time.sleep(LOOK)
                if self._own and store.find(f"deaths/{self._machine}") is None:
                    store.set(f"deaths/{self._machine}", self._own.encode())
                    store.set(_FAILED, b"")
                if self._left and not self.notice:
                    self._check_contract(store)
                if not self.notice:
                    self.notice = plain((store.find(NOTICE) or b"").decode())
                if self._num_machines > 1 and store.find(_FAILED) is not None:
                    self._hear_failures(store)
        except (RuntimeError, OSError, ValueError) as error:
            # Where the machine that hosts it is gone, the peers tell of it.
            if link is self._link and self._num_machines == 1:
                print(f"headway: the control plane is lost: {error}", file=sys.stderr, flush=True)

    def _check_contract(self, store: SealedStore) -> None:
        """A rank that ends before it has come keeps the others waiting for ever."""
        here = present(store, self._world_size)
        missing = [rank for rank in self._left if rank not in here]
        if missing and here:
            they = "it" if len(missing) == 1 else "they"
            absent = [rank for rank in range(self._world_size) if rank not in here]
            notice = f"{named(missing)} ended with exit code 0 before {they} joined the run: "
            store.set(NOTICE, (notice + roll(self._world_size, absent, "so far")).encode())

    def _hear_failures(self, store: SealedStore) -> None:
        for machine in range(self._num_machines):
            if machine == self._machine or machine in self._others:
                continue
            told = store.find(f"deaths/{machine}")
            if told is not None:
                self._others[machine] = plain(json.loads(told))
        self.has_failed_elsewhere = bool(self._others)

    # ---------------------------------------------------------------- failures

    def merge(self, own: FailureReport | None, is_over: Callable[[], bool]) -> FailureReport | None:
        """Tell the other machines what failed here, and hear what failed there.

        Args:
            own: what failed here; None for nothing.
            is_over: says that waiting for the others is in vain, as one of them is lost.

        Returns:
            One report of all machines, whose first failure is the same on each; None where nothing failed.
        """
        if self._num_here == 1:
            return own
        self._own = json.dumps({} if own is None else asdict(own))
        _wait_until(lambda: len(self._others) == self._num_here - 1 or is_over(), GATHER)
        # Until what failed here is on its way: this process may end next, and with it, on machine 0, the store.
        time.sleep(2 * LOOK)
        reports = [one for one in (own, *map(_decode, self._others.values())) if one is not None]
        deaths = tuple(death for one in reports for death in one.deaths)
        if not deaths:
            return None
        merged = FailureReport(
            deaths, self._world_size, "", tuple(sorted(rank for one in reports for rank in one.finished))
        )
        memory = next(one.memory for one in reports if merged.first in one.deaths)
        # Machine 0 has said what failed there, if anything, so it lives and is about to tell all.
        is_told = self._has_one_screen and 0 in self._others
        if is_told:
            _wait_until(is_over, TELL)
            time.sleep(2 * LOOK)
        return replace(merged, memory=memory, is_told_by_rank_0=is_told)


def _wait_until(is_so: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not is_so() and time.monotonic() < deadline:
        time.sleep(LOOK / 4)


def _decode(content: dict[str, Any]) -> FailureReport | None:
    if not content:
        return None
    deaths = tuple(
        RankExit(**{**death, "record": None if death["record"] is None else ExceptionRecord(**death["record"])})
        for death in content["deaths"]
    )
    return FailureReport(**{**content, "deaths": deaths, "finished": tuple(content["finished"])})
